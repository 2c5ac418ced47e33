#include "rewriter/graph/outline_regions.h"

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/inline_regions.h"

namespace tsmem {
namespace {

using nlohmann::json;

const std::pair<const char*, const char*> kKinds[] = {{"sym_int_values", "as_sym_int"},
                                                      {"sym_float_values", "as_sym_float"},
                                                      {"sym_bool_values", "as_sym_bool"},
                                                      {"tensor_values", "as_tensor"}};

class RegionOutliner {
 public:
  explicit RegionOutliner(json& graph) : graph_(graph), nodes_(graph.at("nodes")) {
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (const std::string& name : names_in(nodes_[i].at("inputs"))) last_use_[name] = i;
    for (const std::string& name : names_in(graph.at("outputs"))) last_use_[name] = nodes_.size();
  }

  void run() {
    json nodes = json::array();
    for (size_t at = 0; at < nodes_.size();) add(at, nodes);
    graph_["nodes"] = std::move(nodes);
  }

 private:
  // Adds the node, or the region, that begins at `at`, which becomes the place behind it.
  void add(size_t& at, json& nodes) {
    if (!is_border(nodes_[at]))
      nodes.push_back(nodes_[at++]);
    else if (json node = region(at); !node.is_null())
      nodes.push_back(std::move(node));
  }

  json argument(const std::string& name) const {
    for (const auto& [table, kind] : kKinds)
      if (graph_.contains(table) && graph_[table].contains(name))
        return {{kind, {{std::string(kind) == "as_tensor" ? "name" : "as_name", name}}}};
    throw std::logic_error("'" + name + "' of a rewritten graph has no description");
  }

  json arguments(const std::vector<std::string>& names) const {
    json all = json::array();
    for (const std::string& name : names) all.push_back(argument(name));
    return all;
  }

  // Null where nothing is in it.
  json region(size_t& at) {
    json node = nodes_[at].at("region");
    json nodes = json::array();
    for (++at; !is_border(nodes_[at]) || begins_region(nodes_[at]);) add(at, nodes);
    const size_t end = at++;
    if (nodes.empty()) return {};

    std::set<std::string> made, given;
    std::vector<std::string> order_made, order_given;
    for (const json& n : nodes) {
      for (const std::string& name : names_in(n.at("inputs")))
        if (!made.count(name) && given.insert(name).second) order_given.push_back(name);
      for (const std::string& name : names_in(n.at("outputs")))
        if (made.insert(name).second) order_made.push_back(name);
    }
    std::vector<std::string> results;
    for (const std::string& name : order_made)
      if (const auto use = last_use_.find(name); use != last_use_.end() && use->second > end) results.push_back(name);
    // torch.export.load takes no operator without a result.
    if (results.empty() && !order_made.empty()) results = {order_made.back()};

    for (json& input : node["inputs"])
      if (input.at("arg").contains("as_graph")) fill(input["arg"]["as_graph"]["graph"], nodes, order_given, results);
    for (const std::string& name : order_given)
      node["inputs"].push_back({{"name", ""}, {"arg", argument(name)}, {"kind", 1}});
    node["outputs"] = arguments(results);
    node["is_hop_single_tensor_return"] = false;
    if (!results.empty()) node["name"] = "region_of_" + results[0];
    return node;
  }

  void fill(json& graph, json& nodes, const std::vector<std::string>& given, const std::vector<std::string>& results) {
    graph["inputs"] = arguments(given);
    graph["outputs"] = arguments(results);
    graph["is_single_tensor_return"] = false;
    std::vector<std::string> names = given;
    for (const json& n : nodes)
      for (const std::string& name : names_in(n.at("outputs"))) names.push_back(name);
    for (const std::string& name : names)
      for (const auto& [table, kind] : kKinds)
        if (graph_.contains(table) && graph_[table].contains(name)) graph[table][name] = graph_[table][name];
    graph["nodes"] = std::move(nodes);
  }

  json& graph_;
  const json nodes_;
  std::unordered_map<std::string, size_t> last_use_;  // by the place of the node; that of the graph is behind all
};

}  // namespace

void outline_regions(json& graph) { RegionOutliner(graph).run(); }

}  // namespace tsmem
