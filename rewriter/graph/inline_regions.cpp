#include "rewriter/graph/inline_regions.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "rewriter/error.h"
#include "rewriter/graph/autocast_casts.h"
#include "rewriter/graph/exported_schema.h"

namespace tsmem {

using nlohmann::json;

namespace {

const char* const kBegin = "tsmem.region.begin";
const char* const kEnd = "tsmem.region.end";
const char* const kTables[] = {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values",
                               "custom_obj_values"};

// A region: its mode, as a border has it ("no_grad", "enable_grad", "autocast" and a type of devices), its graph, and
// what goes in.
struct ModeRegion {
  std::vector<std::string> mode;
  std::optional<int64_t> casts_to;  // the dtype of an autocast that is switched on, in the schema's numbers
  bool caches = false;              // such an autocast
  size_t graph_at = 0;              // among the node's inputs
  const json* graph = nullptr;
  std::vector<const json*> inputs;
};

std::optional<ModeRegion> region_of(const json& node) {
  const auto target = node.at("target").get<std::string>();
  const bool autocast = target == "torch.ops.higher_order.wrap_with_autocast";
  if (!autocast && target != "torch.ops.higher_order.wrap_with_set_grad_enabled") return std::nullopt;
  const json& given = node.at("inputs");
  const auto argument = [&](size_t i) -> const json& { return given.at(i).at("arg"); };
  const size_t at = autocast ? 4 : 1;  // device, dtype, enabled, cache; or enabled
  ModeRegion region;
  region.graph_at = at;
  region.graph = &argument(at).at("as_graph").at("graph");
  const bool enabled = argument(autocast ? 2 : 0).at("as_bool").get<bool>();
  if (autocast) {
    region.mode = {"autocast", argument(0).at("as_string").get<std::string>()};
    if (enabled && !argument(1).contains("as_scalar_type")) return std::nullopt;
    if (enabled) region.casts_to = argument(1).at("as_scalar_type").get<int64_t>();
    region.caches = argument(3).value("as_bool", true);
  } else {
    region.mode = {enabled ? "enable_grad" : "no_grad"};
  }
  for (size_t i = at + 1; i < given.size(); ++i) region.inputs.push_back(&argument(i));
  return region;
}

// "a;b;c" and "a;b;d": "a;b".
std::string common_stack(const std::string& a, const std::string& b) {
  size_t common = 0;
  for (size_t i = 0;; ++i) {
    const bool a_ends = i >= a.size() || a[i] == ';', b_ends = i >= b.size() || b[i] == ';';
    if (a_ends && b_ends) common = i;
    if (i >= a.size() || i >= b.size() || a[i] != b[i]) return a.substr(0, common);
  }
}

std::string stack_of(const json& node) {
  return node.contains("metadata") ? node["metadata"].value("nn_module_stack", "") : "";
}

std::set<std::string> parameters_of(const json& graph_module) {
  std::set<std::string> names;
  const json &inputs = graph_module.at("graph").at("inputs"), &specs = graph_module.at("signature").at("input_specs");
  for (size_t i = 0; i < inputs.size() && i < specs.size(); ++i)
    if (specs[i].contains("parameter"))
      for (const std::string& name : names_in(json::array({inputs[i]}))) names.insert(name);
  return names;
}

class Inliner {
 public:
  Inliner(json& graph_module, std::map<std::string, std::string>& casts_unknown)
      : graph_(graph_module.at("graph")),
        unknown_(casts_unknown),
        parameters_(parameters_of(graph_module)),
        taken_(value_names(graph_)),
        casts_{graph_, parameters_, taken_} {}

  void run() {
    json nodes = json::array();
    std::swap(nodes, graph_["nodes"]);
    for (json& node : nodes) add(std::move(node), {});
    for (json& output : graph_["outputs"]) rename(output, outer_);
  }

 private:
  using Names = std::unordered_map<std::string, std::string>;

  // An operator under autocast of which it can't be told what is cast.
  struct CastsUnknown {
    std::string target;
  };

  static void rename(json& argument, const Names& names) {
    for_each_name(argument, [&](json& name) {
      if (const auto other = names.find(name.get<std::string>()); other != names.end()) name = other->second;
    });
  }

  // Adds a node, or its region's.
  void add(json node, const std::string& stack) {
    if (is_border(node)) throw json::other_error::create(501, "a border of no region", nullptr);
    for (json& input : node["inputs"]) rename(input["arg"], outer_);
    if (!stack.empty() && stack_of(node).empty()) node["metadata"]["nn_module_stack"] = stack;
    const auto region = region_of(node);
    if (region && add_region(*region, node)) return;
    if (!autocast_.dtypes.empty() && (region || !add_casts(casts_, autocast_, uncertain_, node)))
      throw CastsUnknown{node.at("target")};
    note_uncertain(node);
    graph_["nodes"].push_back(std::move(node));
  }

  // Where an autocast may be on around the program, what its operators give may have another dtype than it says.
  void note_uncertain(const json& node) {
    const auto inputs = names_in(node.at("inputs"));
    const bool from_uncertain =
        std::any_of(inputs.begin(), inputs.end(), [&](const std::string& name) { return uncertain_.count(name) > 0; });
    if (may_be_cast(node) && (in_autocast_ == 0 || from_uncertain))
      for (const std::string& name : names_in(node.at("outputs"))) uncertain_.insert(name);
  }

  // False where its inputs and results are no tensors or numbers by name, or what is cast in it can't be told.
  bool add_region(const ModeRegion& region, const json& node) {
    const Autocast around = autocast_;
    const int autocasts = in_autocast_;
    const auto cached = casts_.cached;
    const Names names = outer_;
    const size_t before = graph_["nodes"].size();
    const bool of_autocast = region.mode[0] == "autocast";
    if (of_autocast) switch_autocast(region);
    in_autocast_ += of_autocast;
    bool added = false;
    try {
      added = add_inside(region, node);
    } catch (const CastsUnknown& e) {
      if (!around.dtypes.empty()) throw;
      unknown_[node.at("name")] = e.target;
      outer_ = names;
      while (graph_["nodes"].size() > before) graph_["nodes"].erase(graph_["nodes"].size() - 1);
    }
    autocast_ = around;
    in_autocast_ = autocasts;
    // The casts of parameters live until the outermost autocast ends.
    if (!added || autocast_.dtypes.empty()) casts_.cached = autocast_.dtypes.empty() ? decltype(cached)() : cached;
    return added;
  }

  void switch_autocast(const ModeRegion& region) {
    if (region.casts_to) {
      autocast_.dtypes[region.mode[1]] = *region.casts_to;
      autocast_.caches = region.caches;
    } else {
      autocast_.dtypes.erase(region.mode[1]);
    }
  }

  bool add_inside(const ModeRegion& region, const json& node) {
    json inner = *region.graph;
    const auto formal = names_in(inner.at("inputs")), results = names_in(inner.at("outputs"));
    const auto outputs = names_in(node.at("outputs"));
    if (formal.size() != region.inputs.size() || outputs.size() != results.size()) return false;
    Names names;
    for (size_t i = 0; i < formal.size(); ++i) {
      const auto given = names_in(json::array({*region.inputs[i]}));
      if (given.size() != 1 || region.inputs[i]->contains("as_custom_obj")) return false;
      names[formal[i]] = given[0];
    }
    std::string stack;
    bool first = true;
    for (const json& n : inner.at("nodes")) {
      for (const std::string& name : names_in(n.at("outputs"))) {
        const auto result = std::find(results.begin(), results.end(), name);
        names[name] = result == results.end() ? unused_name(taken_, name) : outputs[result - results.begin()];
      }
      if (const std::string own = stack_of(n); !own.empty())
        stack = std::exchange(first, false) ? own : common_stack(stack, own);
    }
    for (const char* table : kTables)
      if (inner.contains(table))
        for (const auto& [name, value] : inner[table].items())
          if (const auto other = names.find(name); other != names.end()) graph_[table].emplace(other->second, value);
    if (stack.empty()) stack = stack_of(node);
    json begin = border(kBegin, region.mode, stack);
    begin["region"] = empty_region(region, node);
    graph_["nodes"].push_back(std::move(begin));
    const Names around = std::exchange(outer_, names);
    for (json& n : inner["nodes"]) {
      for (json& output : n["outputs"]) rename(output, names);
      add(std::move(n), stack);
    }
    const Names inside = std::exchange(outer_, around);
    graph_["nodes"].push_back(border(kEnd, region.mode, stack));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto known = inside.find(results[i]);
      call(outputs[i], known == inside.end() ? results[i] : known->second);
    }
    return true;
  }

  // The region's node, to be filled again (outline_regions.h). Where autocast is on in it the casts are written out,
  // and it is off.
  static json empty_region(const ModeRegion& region, const json& node) {
    json empty = node;
    json& inputs = empty["inputs"];
    inputs.erase(inputs.begin() + static_cast<json::difference_type>(region.graph_at) + 1, inputs.end());
    json& graph = inputs[region.graph_at]["arg"]["as_graph"]["graph"];
    for (const char* list : {"inputs", "outputs", "nodes"}) graph[list] = json::array();
    for (const char* table : kTables)
      if (graph.contains(table)) graph[table] = json::object();
    if (region.casts_to) inputs[2]["arg"] = {{"as_bool", false}};
    return empty;
  }

  // What the graph around calls `name`, perhaps by another name still, is `now`.
  void call(const std::string& name, const std::string& now) {
    bool known = false;
    for (auto& [theirs, ours] : outer_)
      if (ours == name) {
        ours = now;
        known = true;
      }
    if (!known) outer_[name] = now;
  }

  static json border(const char* target, const std::vector<std::string>& mode, const std::string& stack) {
    return {{"target", target},
            {"inputs", json::array()},
            {"outputs", json::array()},
            {"mode", mode},
            {"metadata", {{"nn_module_stack", stack}}}};
  }

  json& graph_;
  std::map<std::string, std::string>& unknown_;
  std::set<std::string> parameters_;
  std::unordered_set<std::string> taken_;
  Casts casts_;
  Autocast autocast_;
  int in_autocast_ = 0;              // how many of its blocks, on or off, are around
  std::set<std::string> uncertain_;  // tensors
  Names outer_;                      // the names by now of what the graph that is gone through calls otherwise
};

}  // namespace

bool is_border(const json& node) { return node.at("target") == kBegin || node.at("target") == kEnd; }

bool begins_region(const json& border) { return border.at("target") == kBegin; }

ExportedProgram with_regions_inline(ExportedProgram program) {
  try {
    Inliner(program.program.at("graph_module"), program.casts_unknown).run();
  } catch (const json::exception&) {
    throw Error(
        ErrorKind::input,
        "'" + program.path + "' is damaged: its graph is not as torch.export writes it; copy or save it again.");
  }
  return program;
}

}  // namespace tsmem
