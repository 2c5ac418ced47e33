// Casts, and other operators of one tensor, written into a graph in the form of torch.export.
#pragma once
#include <c10/core/ScalarType.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <unordered_set>

namespace tsmem {

// Where casts come from and go to.
struct Casts {
  nlohmann::json& graph;  // whose "tensor_values" describe the operands, and are to describe the casts
  const std::set<std::string>& parameters;
  std::unordered_set<std::string>& taken;                              // names of values
  std::map<std::pair<std::string, int64_t>, std::string> cached = {};  // of parameters, by name and dtype
};

// The names of the values of a graph.
std::unordered_set<std::string> value_names(const nlohmann::json& graph);

// `wanted`, or that with a number behind it, which is `taken` from now on.
std::string unused_name(std::unordered_set<std::string>& taken, const std::string& wanted);

// The description of a tensor; null for a number.
const nlohmann::json* described(const nlohmann::json& graph, const std::string& name);
c10::ScalarType dtype_in(const nlohmann::json& description);

// Adds to the graph's nodes torch.ops.aten.`op` of the tensor `name` and the further input `more`, if any, with the
// metadata of the node `of` that it is for. Its result is called `result`.
void add_operator(nlohmann::json& graph, const std::string& op, const std::string& name, const std::string& result,
                  const nlohmann::json& of, const nlohmann::json& more);

// Adds a cast of the tensor `name` to the graph's nodes, with the metadata of the node that it is for, and gives its
// name; of a parameter that was cast before, where `caches`, the name of that.
std::string cast_of(Casts& casts, const std::string& name, c10::ScalarType to, bool caches, const nlohmann::json& node);

}  // namespace tsmem
