#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// y = linear(x): its backward needs x for the weight's gradient; where x can be recomputed, it isn't kept.
Pattern linear() {
  return {
      .name = "linear",
      .algebra = "y = linear(x, weight, bias)",
      .keeps = "before: x, weight; after: what x is made from, weight (each only if the other's gradient is needed)",
      .conditions = "nothing writes to x later: PyTorch's may keep a copy",
      .for_regions = true,
      .rules = {same_schema("linear", 3, {"a0"})}};
}

}  // namespace tsmem
