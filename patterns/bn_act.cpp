#include "patterns/all.h"

namespace tsmem {

// z = act(batch_norm(y)): keeps y and two statistics a channel; the activation is recomputed from them.
Pattern bn_act() {
  return {.name = "bn-act",
          .algebra = "z = act(batch_norm(y))",
          .keeps =
              "before: y, batch_norm(y) or z, statistics; after: y, statistics (eval mode with a frozen weight: 1 bit "
              "an element where "
              "the activation is piecewise linear)",
          .conditions = "batch_norm(y) has no other user",
          .rules = {{.match = "%n = batch_norm(" + kBatchNorm +
                              ")\n"
                              "%z = act(%n)",
                     .rewrite = "%z = tsmem::batch_norm_act(" + kBatchNorm + ", ACT)"}}};
}

}  // namespace tsmem
