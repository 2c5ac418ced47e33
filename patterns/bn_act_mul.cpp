#include "patterns/all.h"

namespace tsmem {

// p = act(batch_norm(y)) * s, squeeze-excite: the product keeps s and y, which the norm keeps anyway, in place of the
// activation.
Pattern bn_act_mul() {
  return {.name = "bn-act-mul",
          .algebra = "z = act(batch_norm(y)); p = z * s",
          .keeps = "before: y, batch_norm(y), z, s, statistics; after: y, s, statistics",
          .conditions = "batch_norm(y) has no other user; the activation may have; nothing writes to y later",
          .rules = {{.match = "%n = batch_norm(" + kBatchNorm +
                              ")\n"
                              "%z = act(%n)\n"
                              "%p = mul(%z, %s)",
                     .rewrite = "%z, %m, %i = tsmem::batch_norm_act_stats(" + kBatchNorm +
                                ", ACT)\n"
                                "%p = tsmem::mul_batch_norm_act(%z, %s, %y, %gamma, %beta, %m, %i, ACT)",
                     .shared = {"z"},
                     .intact = {"y"}}}};
}

}  // namespace tsmem
