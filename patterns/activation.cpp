#include "patterns/all.h"

namespace tsmem {

// z = act(x): piecewise linear activations keep 1 bit an element; smooth ones one tensor, also where PyTorch's in-place
// form keeps two.
Pattern activation() {
  std::set<std::string> activations = activations_that_save(ActSaves::bit);
  activations.insert("in-place");
  return {.name = "activation",
          .algebra = "z = act(x)",
          .keeps = "before: z (in-place hardtanh, silu, hardswish: a copy of x); after: 1 bit an element, or x",
          .conditions =
              "piecewise linear, or in place; an input that is overwritten in place must not be seen from elsewhere",
          .rules = {{.match = "%z = act(%x)", .rewrite = "%z = tsmem::act(%x, ACT)", .activations = activations}}};
}

}  // namespace tsmem
