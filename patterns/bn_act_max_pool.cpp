#include "patterns/all.h"

namespace tsmem {

// p = max_pool2d(act(batch_norm(y))), a stem: keeps y, two statistics a channel and a few bits an output element;
// backward makes no full-size intermediate but the gradient itself.
Pattern bn_act_max_pool() {
  return {.name = "bn-act-max-pool",
          .algebra = "p = max_pool2d(act(batch_norm(y)))",
          .keeps =
              "before: y, z = act(batch_norm(y)), statistics, 8 bytes an output element; after: y, statistics, 4 bits "
              "an output element (2 for windows of 4, 8 over 16)",
          .conditions = "batch_norm(y) and its activation have no other user; the pool's indices are not used",
          .rules = {{.match = "%n = batch_norm(" + kBatchNorm +
                              ")\n"
                              "%z = act(%n)\n"
                              "%p = max_pool2d(%z, %kernel, %stride, %padding, %dilation, %ceil)",
                     .rewrite = "%p = tsmem::batch_norm_act_max_pool2d(" + kBatchNorm +
                                ", ACT, %kernel, %stride, %padding, %dilation, %ceil)"}}};
}

}  // namespace tsmem
