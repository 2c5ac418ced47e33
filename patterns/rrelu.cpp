#include "patterns/all.h"

namespace tsmem {

// z = rrelu(x): keeps the generator's state and a bit an element, and draws the slopes again in backward.
Pattern rrelu() {
  return {.name = "rrelu",
          .algebra = "z = x where x > 0, else x times a slope that is drawn",
          .keeps = "before: x, the slopes, z; after: the generator's state, 1 bit an element",
          .conditions = "the default generator; not in place",
          .rules = {{.match = "%z = rrelu(%x, %lower, %upper, %train, None)",
                     .rewrite = "%z = tsmem::rrelu(%x, %lower, %upper, %train)"}}};
}

}  // namespace tsmem
