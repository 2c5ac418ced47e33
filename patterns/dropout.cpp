#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = dropout(x): keeps the generator's state and draws the same mask again in backward.
Pattern dropout() {
  Pattern p{
      .name = "dropout",
      .algebra = "z = x * mask / (1 - p)",
      .keeps = "before: a mask of x's dtype; after: the generator's state, or 1 bit an element where that is less",
      .conditions = "not in place",
      .rules = {}};
  // DRAWS: whether TorchScript's own derivative, which this replaces, draws with p = 0 and p = 1 too.
  p.rules.push_back({.match = "%z = dropout(%x, %p, %train)", .rewrite = "%z = tsmem::dropout(%x, %p, %train, DRAWS)"});
  for (const char* op : {"feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
    p.rules.push_back(same_schema(op, 3));
  return p;
}

}  // namespace tsmem
