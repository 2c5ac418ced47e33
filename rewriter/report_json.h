// Reports as `tsmem rewrite --json` and `tsmem plan --json` write them, and as a rewritten file carries them.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "tsmem/plan.h"
#include "tsmem/rewrite.h"

namespace tsmem {

nlohmann::json to_json(const RewriteReport& report);  // matches, refused, regions, and what follows
nlohmann::json to_json(const Saved& saved);           // stays, saved
nlohmann::json to_json(const ChosenPlan& plan);
nlohmann::json to_json(const PlanFront& front);

// tsmem.json among a rewritten file's extra files. `plan`: null where there was none.
nlohmann::json about_json(const RewriteOptions& options, const RewriteReport& report, const ChosenPlan* plan);

}  // namespace tsmem
