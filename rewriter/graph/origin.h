// What a node of a flat body remembers of the graph that it was made from.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <optional>
#include <string>

namespace tsmem {

// `index`: among the graph's nodes. `path`: of the module whose code it is. Clones of the node remember both.
void set_origin(torch::jit::Node* node, int64_t index, const std::string& path);
std::optional<int64_t> origin(const torch::jit::Node* node);

// Gives a new node the path of the one in whose place it stands.
void take_path(torch::jit::Node* node, const torch::jit::Node* from);

// How many of the results in a graph's last tuple are its own. Those behind them are there so that what makes them
// runs.
void set_own_results(torch::jit::Node* tuple, int64_t count);

// The operator "tsmem_graph::opaque(...) -> ...".
c10::Symbol opaque_symbol();

}  // namespace tsmem
