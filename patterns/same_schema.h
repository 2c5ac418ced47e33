// Ops of ours that take their aten namesake's place with the same arguments.
#pragma once
#include "patterns/pattern.h"

namespace tsmem {

// The rule for one overload with `arguments` arguments, named %a0, %a1, and so on. `intact`: see Rule.
Rule same_schema(const std::string& op, size_t arguments, std::set<std::string> intact = {});

}  // namespace tsmem
