#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = layer_norm(x), group_norm(x): z is recomputed from x and two statistics a row.
Pattern layer_norm() {
  return {.name = "layer-norm",
          .algebra = "z = layer_norm(x) or group_norm(x)",
          .keeps = "before: x, z, statistics; after: x or what it is made from, statistics",
          .conditions = "group_norm: nothing writes to x later, as PyTorch's may keep a copy",
          .for_regions = true,
          .rules = {same_schema("layer_norm", 6), same_schema("group_norm", 6, {"a0"})}};
}

}  // namespace tsmem
