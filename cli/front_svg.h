// The picture of `plan`.
#pragma once
#include <string>

#include "tsmem/plan.h"

namespace tsmem::cli {

// Step time over peak, both as ratios to the original; the smallest budget with its value.
std::string front_svg(const std::string& title, const PlanFront& front);

}  // namespace tsmem::cli
