#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = glu(x): z is recomputed from x.
Pattern glu() {
  return {.name = "glu",
          .algebra = "z = a * sigmoid(b), where x = [a, b]",
          .keeps = "before: x, z; after: x or what it is made from",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("glu", 2)}};
}

}  // namespace tsmem
