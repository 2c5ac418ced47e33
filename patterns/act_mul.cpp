#include "patterns/all.h"

namespace tsmem {

// p = act(x) * s: the product keeps s and x, which the activation keeps anyway, in place of act(x).
Pattern act_mul() {
  return {.name = "act-mul",
          .algebra = "z = act(x); p = z * s",
          .keeps = "before: x, z, s; after: x, s",
          .conditions = "a smooth activation, which may have other users; nothing writes to x later",
          .rules = {{.match = "%z = act(%x)\n"
                              "%p = mul(%z, %s)",
                     .rewrite = "%z = tsmem::act(%x, ACT)\n"
                                "%p = tsmem::mul_act(%z, %s, %x, ACT)",
                     .shared = {"z"},
                     .activations = activations_that_save(ActSaves::input),
                     .intact = {"x"}}}};
}

}  // namespace tsmem
