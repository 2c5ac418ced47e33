// A profile as `tsmem profile --json` writes it, with "ops" besides; and what its figures are made with.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "tsmem/profile.h"

namespace tsmem {

nlohmann::json to_json(const Profile& p);

double median(std::vector<double> v);  // 0 of none

}  // namespace tsmem
