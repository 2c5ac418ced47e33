#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = cat(xs): what would keep z keeps the pieces, which have other users (DenseNet, U-Net).
Pattern cat() {
  return {.name = "cat",
          .algebra = "z = cat(xs, dim)",
          .keeps = "before: z, where its user keeps it; after: the pieces, or what they are made from",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("cat", 2)}};
}

}  // namespace tsmem
