// The other way of inline_regions.h: what lies between two borders as an operator on functions again.
#pragma once
#include <nlohmann/json_fwd.hpp>

namespace tsmem {

// Puts the nodes of a graph that lie between the borders of regions into a graph of their own. What a region is given
// is what its nodes take from outside, and its results are what is used outside. The names stay. The graph's tables
// ("tensor_values" and so on) describe the nodes' results.
void outline_regions(nlohmann::json& graph);

}  // namespace tsmem
