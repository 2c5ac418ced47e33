#include "patterns/all.h"

namespace tsmem {

// z = batch_norm(y) by itself: in eval mode with a frozen weight nothing of the feature map is kept.
Pattern batch_norm() {
  return {
      .name = "batch-norm",
      .algebra = "z = batch_norm(y)",
      .keeps = "before: y, statistics; after: the same in training mode; in eval mode y only if the weight needs grad",
      .conditions = "none",
      .rules = {{.match = "%z = batch_norm(" + kBatchNorm + ")",
                 .rewrite = "%z = tsmem::batch_norm_act(" + kBatchNorm + ", ACT)"}}};
}

}  // namespace tsmem
