#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// l = cross_entropy(x, t): its backward needs softmax(x), which is cheap to make from x.
Pattern cross_entropy() {
  return {.name = "cross-entropy",
          .algebra = "l = cross_entropy(x, t)",
          .keeps = "before: log_softmax(x), t; after: x or what it is made from, t",
          .conditions = "the targets are classes, and labels are not smoothed (else PyTorch's runs)",
          .for_regions = true,
          .rules = {same_schema("cross_entropy_loss", 6, {"a0"})}};
}

}  // namespace tsmem
