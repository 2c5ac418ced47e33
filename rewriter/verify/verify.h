// A verification's result as `tsmem verify --json` writes it.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "tsmem/verify.h"

namespace tsmem {

nlohmann::json to_json(const VerifyResult& r);

}  // namespace tsmem
