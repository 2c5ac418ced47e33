#include "patterns/all.h"
#include "patterns/cheap.h"

namespace tsmem {

// y = f(x), cheap to run again: chains of these between expensive operators keep nothing.
Pattern pointwise() {
  return {.name = "pointwise",
          .algebra = "y = f(x): elementwise functions, choices by a mask, casts, copies, variances, norms",
          .keeps = "before: x or y, and y, where its user keeps it; after: what x is made from",
          .conditions =
              "an operand is a parameter, or comes from an operator that can run again, or a branch; or all are kept "
              "anyway",
          .for_regions = true,
          .rules = cheap_rules(Worth::fed)};
}

}  // namespace tsmem
