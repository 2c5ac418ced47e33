#include "patterns/all.h"
#include "patterns/cheap.h"
#include "patterns/same_schema.h"

namespace tsmem {

// y = x in another order: attention's heads put together, a window shifted.
Pattern copies() {
  Rule reshape = same_schema("reshape", 2), contiguous = same_schema("contiguous", 2),
       flatten = same_schema("flatten", 3);
  reshape.fed_by = flatten.fed_by = {"permute", "transpose", "movedim", "swapaxes", "expand", "squeeze", "roll"};
  // A sum or a concatenation may be channels_last, as its operands are.
  contiguous.fed_by = reshape.fed_by;
  contiguous.fed_by.insert(recomputed_operators().begin(), recomputed_operators().end());
  return {.name = "copies",
          .algebra = "y = contiguous(x), reshape(x), flatten(x) or roll(x)",
          .keeps = "before: y, where its user keeps it; after: what x is made from",
          .conditions =
              "x is permuted, transposed or expanded, but for roll; contiguous: or comes from an operator that can run "
              "again",
          .for_regions = true,
          .rules = {reshape, contiguous, flatten, same_schema("roll", 3)}};
}

}  // namespace tsmem
