#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = prelu(x, slopes): z is recomputed from x.
Pattern prelu() {
  return {.name = "prelu",
          .algebra = "z = prelu(x, slopes)",
          .keeps = "before: x, z, and in backward a product of x's size; after: x or what it is made from",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("prelu", 2)}};
}

}  // namespace tsmem
