#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = the sum over shared subscripts of products of the xs: as matrix products of pairs, each of which needs a factor
// for the other one's gradient.
Pattern einsum() {
  return {.name = "einsum",
          .algebra = "z = einsum(equation, xs), or tensordot(x, y, dims, dims)",
          .keeps =
              "before: the xs, or copies in another order; after: what they are made from (each only if another "
              "one's gradient is needed)",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("einsum", 3), same_schema("tensordot", 4)}};
}

}  // namespace tsmem
