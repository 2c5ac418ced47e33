// The built-in patterns, one file a pattern. What a pattern is: tsmem/pattern.h.
#pragma once
#include <vector>

#include "tsmem/pattern.h"

namespace tsmem {

// In the order in which they are tried: the first that matches a node takes it.
const std::vector<Pattern>& all_patterns();

}  // namespace tsmem
