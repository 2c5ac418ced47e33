#include "patterns/all.h"

namespace tsmem {

// z = act(instance_norm(y)), or the norm by itself.
Pattern instance_norm() {
  const std::string norm = "(%y, %gamma, %beta, %mean, %var, %stats, %momentum, %eps, %cudnn";
  return {.name = "instance-norm",
          .algebra = "z = act(instance_norm(y))",
          .keeps = "before: y, instance_norm(y) or z, statistics; after: y, statistics",
          .conditions =
              "instance_norm(y) has no other user; without an activation it is replaced all the same; "
              "nothing writes to y later, as PyTorch's may keep a copy",
          .rules = {{.match = "%n = instance_norm" + norm + ")\n%z = act(%n)",
                     .rewrite = "%z = tsmem::instance_norm_act" + norm + ", ACT)",
                     .intact = {"y"}},
                    {.match = "%z = instance_norm" + norm + ")",
                     .rewrite = "%z = tsmem::instance_norm_act" + norm + ", ACT)",
                     .intact = {"y"}}}};
}

}  // namespace tsmem
