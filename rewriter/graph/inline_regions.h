// Regions of an exported program that run in another mode (torch.no_grad, torch.enable_grad, autocast), which
// torch.export writes as operators on functions.
#pragma once
#include "rewriter/graph/exported_program.h"

namespace tsmem {

// The program with the nodes of such regions in its graph's own list, between two nodes that are their borders, in the
// calls of modules that all nodes of the region are in. Where autocast is on, what it casts is written out, and the
// region switches it off (autocast_casts.h). Regions where that can't be told, which `casts_unknown` names with the
// operator that is why, and regions of other kinds are left as they are.
ExportedProgram with_regions_inline(ExportedProgram program);

// The nodes of such a program that are borders, and those of them that a region begins with: "mode" is
// ["no_grad"], ["enable_grad"] or ["autocast", type of devices], "region" the region's node with an empty graph.
bool is_border(const nlohmann::json& node);
bool begins_region(const nlohmann::json& border);

}  // namespace tsmem
