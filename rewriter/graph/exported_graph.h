// A graph as torch.export writes it, as a TorchScript module, and back.
//
// The JSON is that of an archive's `models/*.json`, schema 8.17 to 8.20 (torch/_export/serde/schema.py): its object
// "graph_module", of which "graph" and "signature" are read. Python describes Dynamo's graphs in the same form.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tsmem {

// The tensor of a parameter, buffer or constant by its path ("layer1.0.conv1.weight"). On the meta device it stands for
// one: what counts then is its dtype, whether it requires a gradient, and what it shares memory with.
using StateOf = std::function<at::Tensor(const std::string& path)>;

// A module with that state in submodules of the same paths, each with an attribute `training`, and one method,
// `forward`, whose body is flat: one node for each of the graph's, in its order and with its names, each knowing the
// path of the module whose code it is (module_path). Parameters, buffers and constants are read as attributes; every
// other input is an argument. A node that TorchScript can't express (an operator on functions, such as cond) is a
// tsmem_graph::opaque, which nothing matches and nothing moves across. Throws Error(ErrorKind::input) where the graph
// names an operator that isn't registered or contradicts itself.
torch::jit::Module module_of_graph(const nlohmann::json& graph_module, const StateOf& state);

// The flat `forward` of a module that module_of_graph made and rewrite() changed, as a graph with the inputs, the
// results and the values' names of `original`. Attributes that a plan has added are written as the constants that they
// hold. Meta data of a new node ("stack_trace", "nn_module_stack") are those of the node that made its result before.
// "tensor_values" describe what keeps its name alone.
nlohmann::json graph_of_module(const torch::jit::Module& rewritten, const nlohmann::json& original);

// The path of the module whose code a node of a flat body is ("layer1.0.bn1"; "" for the root and for all other nodes).
std::string module_path(const torch::jit::Node* node);

// Whether nothing uses a node's results, which are among the module's so that it runs: it draws, or updates statistics.
bool runs_for_its_effect(const torch::jit::Node* node);

// Whether a node is one that TorchScript can't express.
bool is_opaque(const torch::jit::Node* node);

// Whether a module's forward has such a node, and so can't run.
bool has_opaque(const torch::jit::Module& module);

}  // namespace tsmem
