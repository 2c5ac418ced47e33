#include "patterns/all.h"

namespace tsmem {

// z = act(batch_norm(y) + r), the end of a residual block: keeps y, two statistics a channel and 1 bit an element, or
// r.
Pattern bn_add_act() {
  Rule masked = {.match = "%n = batch_norm(" + kBatchNorm +
                          ")\n"
                          "%s = add(%n, %r)\n"
                          "%z = act(%s)",
                 .rewrite = "%z = tsmem::batch_norm_add_act(" + kBatchNorm + ", %r, ACT)"};
  Rule smooth = masked;
  masked.activations = activations_that_save(ActSaves::bit);
  smooth.activations = activations_that_save(ActSaves::input);
  smooth.activations.insert({"sigmoid", "tanh"});
  smooth.intact = {"r", "y"};
  return {.name = "bn-add-act",
          .algebra = "z = act(batch_norm(y) + r)",
          .keeps = "before: y, z, statistics; after: y, statistics, 1 bit an element (smooth activations: r)",
          .conditions =
              "batch_norm(y) and the sum have no other user; the sum has no factor; smooth activations: nothing "
              "writes to r or y later",
          .rules = {masked, smooth}};
}

}  // namespace tsmem
