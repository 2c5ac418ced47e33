#include "rewriter/graph/for_torchscript.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "rewriter/graph/casts.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/inline_regions.h"

namespace tsmem {
namespace {

using nlohmann::json;

// Operators that take several floating dtypes, or give another than they take.
constexpr std::string_view kPromoting =
    " add addcdiv addcmul atan2 cat copysign cumsum div fmod hypot lerp log_softmax logaddexp max maximum mean min "
    "minimum mul pow prod remainder rsub softmax stack sub sum true_divide where ";

bool is_mutable(const json& node) {
  const OperatorOverload op = operator_of(node.at("target").get<std::string>());
  const auto handle = c10::Dispatcher::singleton().findSchema({op.name, op.overload});
  return !handle || handle->schema().is_mutable();
}

class Adapter {
 public:
  explicit Adapter(json& graph) : graph_(graph), taken_(value_names(graph)), casts_{graph_, no_parameters_, taken_} {}

  void run() {
    json nodes = json::array();
    std::swap(nodes, graph_["nodes"]);
    for (const json& node : nodes)
      for (const std::string& name : names_in(node.at("inputs"))) ++uses_[name];
    for (const std::string& name : names_in(graph_.at("outputs"))) ++uses_[name];
    for (json& node : nodes) {
      for (json& input : node.at("inputs")) rename(input.at("arg"));
      if (is_border(node)) {
        graph_["nodes"].push_back(node);
        cross(node);
        continue;
      }
      if (!modes_.empty() && modes_.back().name == "no_grad") detach(node);
      promote(node);
      graph_["nodes"].push_back(std::move(node));
    }
    for (json& output : graph_.at("outputs")) rename(output);
  }

 private:
  // A region that switches gradients off or on.
  struct Mode {
    std::string name;
    std::set<std::string> made = {};                   // in it
    std::map<std::string, std::string> detached = {};  // by the name outside
  };

  void cross(const json& border) {
    const auto mode = border.at("mode").at(0).get<std::string>();
    if (mode == "autocast") return;
    if (begins_region(border)) {
      modes_.push_back({mode});
      return;
    }
    const Mode left = std::move(modes_.back());
    modes_.pop_back();
    if (left.name != "no_grad") return;
    for (const std::string& name : left.made)
      if (uses_[name] > 0 && is_floating(described(graph_, name))) renamed_[name] = add_detach(name, border);
  }

  // The uses of names by what comes.
  void rename(json& argument) {
    for_each_name(argument, [&](json& name) {
      --uses_[name.get<std::string>()];
      if (const auto other = renamed_.find(name.get<std::string>()); other != renamed_.end()) name = other->second;
    });
  }

  static bool is_floating(const json* description) {
    return description && c10::isFloatingType(dtype_in(*description));
  }

  void promote(json& node) {
    const std::string op = operator_of(node.at("target").get<std::string>()).name;
    if (!op.starts_with("aten::") || kPromoting.find(fmt::format(" {} ", op.substr(6))) == std::string_view::npos)
      return;
    const auto results = names_in(node.at("outputs"));
    const json* result = results.empty() ? nullptr : described(graph_, results[0]);
    if (!is_floating(result)) return;
    const auto to = dtype_in(*result);
    for (json& input : node.at("inputs"))
      for_each_name(input.at("arg"), [&](json& operand) {
        const json* value = described(graph_, operand);
        if (is_floating(value) && dtype_in(*value) != to && c10::promoteTypes(dtype_in(*value), to) == to)
          operand = cast_of(casts_, operand, to, /*caches=*/false, node);
      });
  }

  void detach(json& node) {
    if (is_mutable(node)) return;
    Mode& mode = modes_.back();
    for (json& input : node.at("inputs"))
      for_each_name(input.at("arg"), [&](json& operand) {
        const auto name = operand.get<std::string>();
        if (mode.made.count(name) || !is_floating(described(graph_, name))) return;
        std::string& known = mode.detached[name];
        if (known.empty()) known = add_detach(name, node);
        operand = known;
      });
    for (const std::string& name : names_in(node.at("outputs"))) mode.made.insert(name);
  }

  std::string add_detach(const std::string& name, const json& node) {
    const std::string result = unused_name(taken_, name + "_detached");
    add_operator(graph_, "detach.default", name, result, node, nullptr);
    return result;
  }

  json& graph_;
  const std::set<std::string> no_parameters_;
  std::unordered_set<std::string> taken_;
  Casts casts_;
  std::vector<Mode> modes_;
  std::unordered_map<std::string, int> uses_;  // that are to come
  std::unordered_map<std::string, std::string> renamed_;
};

}  // namespace

ExportedProgram for_torchscript(ExportedProgram program) {
  Adapter(program.program.at("graph_module").at("graph")).run();
  return program;
}

}  // namespace tsmem
