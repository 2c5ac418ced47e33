#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// p = softmax(x): its backward needs p alone.
Pattern softmax() {
  return {.name = "softmax",
          .algebra = "p = softmax(x)",
          .keeps = "before: p; after: p, or what x is made from",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("softmax", 3)}};
}

}  // namespace tsmem
