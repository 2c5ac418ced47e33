#include "rewriter/graph/casts.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/tensor_values.h"

namespace tsmem {

using nlohmann::json;

std::unordered_set<std::string> value_names(const json& graph) {
  std::unordered_set<std::string> names;
  for (const std::string& name : names_in(graph.at("inputs"))) names.insert(name);
  for (const json& node : graph.at("nodes"))
    for (const std::string& name : names_in(node.at("outputs"))) names.insert(name);
  return names;
}

std::string unused_name(std::unordered_set<std::string>& taken, const std::string& wanted) {
  std::string other = wanted;
  for (int k = 1; !taken.insert(other).second; ++k) other = fmt::format("{}_{}", wanted, k);
  return other;
}

const json* described(const json& graph, const std::string& name) {
  const json& values = graph.at("tensor_values");
  const auto found = values.find(name);
  return found == values.end() ? nullptr : &*found;
}

c10::ScalarType dtype_in(const json& description) { return dtype_of(description.at("dtype").get<int64_t>()); }

void add_operator(json& graph, const std::string& op, const std::string& name, const std::string& result,
                  const json& of, const json& more) {
  json inputs = {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", name}}}}}, {"kind", 1}}};
  if (!more.is_null()) inputs.push_back(more);
  const json node = {{"target", "torch.ops.aten." + op},
                     {"inputs", inputs},
                     {"outputs", {{{"as_tensor", {{"name", result}}}}}},
                     {"metadata", of.value("metadata", json::object())},
                     {"is_hop_single_tensor_return", nullptr},
                     {"name", result}};
  describe_results(graph, node);
  graph["nodes"].push_back(node);
}

std::string cast_of(Casts& casts, const std::string& name, c10::ScalarType to, bool caches, const json& node) {
  const std::pair<std::string, int64_t> key(name, exported_dtype(to));
  const bool once = caches && casts.parameters.count(name) > 0;
  if (once)
    if (const auto known = casts.cached.find(key); known != casts.cached.end()) return known->second;
  const std::string result = unused_name(casts.taken, name + "_cast");
  add_operator(casts.graph, "to.dtype", name, result, node,
               {{"name", "dtype"}, {"arg", {{"as_scalar_type", exported_dtype(to)}}}, {"kind", 1}});
  if (once) casts.cached[key] = result;
  return result;
}

}  // namespace tsmem
