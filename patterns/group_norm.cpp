#include "patterns/all.h"

namespace tsmem {

// z = act(group_norm(y)): keeps y and two statistics a group; the norm's result is recomputed piece by piece.
Pattern group_norm_act() {
  const std::string norm = "(%y, %groups, %gamma, %beta, %eps, %cudnn";
  return {.name = "group-norm-act",
          .algebra = "z = act(group_norm(y))",
          .keeps = "before: y, group_norm(y) or z, statistics; after: y, statistics",
          .conditions = "group_norm(y) has no other user; nothing writes to y later, as PyTorch's may keep a copy",
          .rules = {{.match = "%n = group_norm" + norm + ")\n%z = act(%n)",
                     .rewrite = "%z = tsmem::group_norm_act" + norm + ", ACT)",
                     .intact = {"y"}}}};
}

}  // namespace tsmem
