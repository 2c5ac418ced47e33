#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = beta s + alpha a b: its backward needs a for b's gradient and b for a's; where one can be recomputed, it isn't
// kept.
Pattern addmm() {
  return {.name = "addmm",
          .algebra = "z = a b, or beta s + alpha a b: mm, bmm, addmm, baddbmm, grouped_mm",
          .keeps = "before: a, b; after: what a and b are made from (each only if the other's gradient is needed)",
          .conditions = "none",
          .for_regions = true,
          .rules = {same_schema("addmm", 5), same_schema("baddbmm", 5), same_schema("mm", 2), same_schema("bmm", 2),
                    same_schema("_grouped_mm", 5)}};
}

}  // namespace tsmem
