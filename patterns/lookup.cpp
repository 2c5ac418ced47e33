#include "patterns/all.h"
#include "patterns/cheap.h"

namespace tsmem {

// y = x[i], repeat(x), interpolate(x): y may be larger than what it is made from.
Pattern lookup() {
  return {.name = "lookup",
          .algebra = "y = x[i]: index, index_select, gather, embedding; repeat, unfold, interpolate",
          .keeps = "before: y, where its user keeps it; after: x or what it is made from, and i",
          .conditions = "none",
          .for_regions = true,
          .rules = cheap_rules(Worth::always)};
}

}  // namespace tsmem
