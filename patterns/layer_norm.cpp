#include "patterns/all.h"

namespace tsmem {

// z = layer_norm(x), group_norm(x): z is made again from x and two statistics a row.
Pattern layer_norm() {
  return {.name = "layer-norm",
          .algebra = "z = layer_norm(x) or group_norm(x)",
          .keeps = "before: x, z, statistics; after: x or what it is made from, statistics",
          .conditions = "none",
          .for_regions = true,
          .rules = {{.match = "%z = layer_norm(%x, %shape, %gamma, %beta, %eps, %cudnn)",
                     .rewrite = "%z = tsmem::layer_norm(%x, %shape, %gamma, %beta, %eps, %cudnn)"},
                    {.match = "%z = group_norm(%x, %groups, %gamma, %beta, %eps, %cudnn)",
                     .rewrite = "%z = tsmem::group_norm(%x, %groups, %gamma, %beta, %eps, %cudnn)"}}};
}

}  // namespace tsmem
