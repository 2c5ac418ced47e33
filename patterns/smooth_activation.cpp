#include "patterns/all.h"

namespace tsmem {

// z = act(x), smooth: z is recomputed from x.
Pattern smooth_activation() {
  return {.name = "smooth-activation",
          .algebra = "z = act(x), smooth",
          .keeps = "before: x, z; after: x or what it is made from",
          .conditions = "silu, hardswish, gelu, elu, softplus, mish",
          .for_regions = true,
          .rules = {{.match = "%z = act(%x)",
                     .rewrite = "%z = tsmem::act(%x, ACT)",
                     .activations = activations_that_save(ActSaves::input)}}};
}

}  // namespace tsmem
