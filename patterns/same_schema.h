// Ops of ours that take their aten namesake's place with the same arguments.
#pragma once
#include "patterns/pattern.h"

namespace tsmem {

// The rule for one overload with `arguments` arguments.
Rule same_schema(const std::string& op, size_t arguments);

}  // namespace tsmem
