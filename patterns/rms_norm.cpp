#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = rms_norm(x): z is recomputed from x.
Pattern rms_norm() {
  return {.name = "rms-norm",
          .algebra = "z = x / sqrt(mean(x^2) + eps) * weight",
          .keeps = "before: x, its square's mean, x / sqrt(...), z; after: x or what it is made from, one number a row",
          .conditions = "nothing writes to x later: in 16 bits PyTorch keeps a copy",
          .for_regions = true,
          .rules = {same_schema("rms_norm", 4, {"a0"})}};
}

}  // namespace tsmem
