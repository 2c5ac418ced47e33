// Regions of an exported program that run in another mode (torch.no_grad, torch.enable_grad, autocast switched off),
// which torch.export writes as operators on functions.
#pragma once
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <nlohmann/json_fwd.hpp>

namespace tsmem {

// The graph with the nodes of such regions in its own list, between one node that begins the region and one that ends
// it, and in the calls of modules that all nodes of the region are in. Regions of other kinds are left as they are.
nlohmann::json with_regions_inline(nlohmann::json graph);

// Whether a node of such a graph begins or ends a region.
bool is_region_border(const nlohmann::json& node);

// Puts the nodes of TorchScript's `with` in place of those that stand for the borders of regions. border: the node of
// the graph that a node of the body stands for where it is one, else null.
void put_with_blocks(torch::jit::Graph& body, torch::jit::CompilationUnit& unit,
                     const std::function<const nlohmann::json*(const torch::jit::Node*)>& border);

}  // namespace tsmem
