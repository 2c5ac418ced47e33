#include "rewriter/graph/tensor_values.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "rewriter/graph/exported_schema.h"

namespace tsmem {
namespace {

using c10::IValue;
using nlohmann::json;

std::vector<int64_t> numbers(const json& sizes) {
  std::vector<int64_t> all;
  for (const json& size : sizes) all.push_back(exported_size(size).number);
  return all;
}

at::Tensor on_meta(const json& value) {
  return at::empty_strided(numbers(value.at("sizes")), numbers(value.at("strides")),
                           at::TensorOptions(dtype_of(value.at("dtype").get<int64_t>())).device(c10::kMeta));
}

// The call of one node on the meta device.
struct Call {
  const json& graph;
  std::vector<const json*> operands = {};  // descriptions of the tensors

  at::Tensor tensor(const json& name) {
    operands.push_back(&graph.at("tensor_values").at(name.get_ref<const std::string&>()));
    return on_meta(*operands.back());
  }

  int64_t integer(const json& x) const {
    if (x.is_number()) return x.get<int64_t>();
    if (x.contains("as_int")) return x.at("as_int").get<int64_t>();
    return exported_size(graph.at("sym_int_values").at(x.at("as_name").get_ref<const std::string&>())).number;
  }

  static double real(const json& x) { return x.is_number() ? x.get<double>() : std::stod(x.get<std::string>()); }

  static c10::TypePtr plain(c10::TypePtr type) {
    const auto optional = type->cast<c10::OptionalType>();
    return optional ? optional->getElementType() : type;
  }

  IValue value(const json& argument, const c10::Argument& formal) {
    const std::string& kind = argument.begin().key();
    const json& v = argument.begin().value();
    const auto type = plain(formal.type());
    if (kind == "as_none") return IValue();
    if (kind == "as_tensor") return tensor(v.at("name"));
    if (kind == "as_optional_tensor") return value(v, formal);
    if (kind == "as_tensors") {
      c10::List<at::Tensor> all;
      for (const json& t : v) all.push_back(tensor(t.at("name")));
      return all;
    }
    if (kind == "as_optional_tensors") {
      c10::List<std::optional<at::Tensor>> all;
      for (const json& t : v)
        all.push_back(t.contains("as_tensor") ? std::optional(tensor(t.at("as_tensor").at("name"))) : std::nullopt);
      return all;
    }
    if (kind == "as_int" || kind == "as_sym_int") {
      if (type->kind() == c10::TypeKind::FloatType) return static_cast<double>(integer(v));
      if (type->kind() == c10::TypeKind::ListType)
        return std::vector<int64_t>(static_cast<size_t>(formal.N().value_or(1)), integer(v));
      return integer(v);
    }
    if (kind == "as_ints" || kind == "as_sym_ints") {
      std::vector<int64_t> all;
      for (const json& x : v) all.push_back(integer(x));
      return all;
    }
    if (kind == "as_float") return real(v);
    if (kind == "as_floats") {
      std::vector<double> all;
      for (const json& x : v) all.push_back(real(x));
      return all;
    }
    if (kind == "as_bool") return v.get<bool>();
    if (kind == "as_string") return v.get<std::string>();
    if (kind == "as_scalar_type") return static_cast<int64_t>(dtype_of(v.get<int64_t>()));
    if (kind == "as_layout") return layout_of(v.get<int64_t>());
    if (kind == "as_memory_format") return memory_format_of(v.get<int64_t>());
    if (kind == "as_device") return c10::Device(c10::kMeta);
    throw std::logic_error("an operator that rewriting puts in takes no " + kind);
  }

  std::vector<at::Tensor> results(const json& node) {
    const auto op = operator_of(node.at("target").get<std::string>());
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.name.c_str(), op.overload.c_str());
    torch::jit::Stack stack;
    for (const c10::Argument& formal : handle.schema().arguments()) {
      const json& inputs = node.at("inputs");
      const auto given =
          std::find_if(inputs.begin(), inputs.end(), [&](const json& a) { return a.at("name") == formal.name(); });
      stack.push_back(given == inputs.end() ? formal.default_value().value_or(IValue())
                                            : value(given->at("arg"), formal));
    }
    const at::NoGradGuard no_grad;
    handle.callBoxed(stack);
    std::vector<at::Tensor> all;
    for (const IValue& v : stack)
      if (v.isTensor())
        all.push_back(v.toTensor());
      else if (v.isTensorList())
        for (const at::Tensor& t : v.toTensorVector()) all.push_back(t);
    return all;
  }
};

// A size as an operand has it, best at the same place.
json size_as_in(const std::vector<const json*>& operands, const char* what, size_t place, int64_t number) {
  const json* found = nullptr;
  for (const json* operand : operands) {
    const json& sizes = operand->at(what);
    for (size_t i = 0; i < sizes.size(); ++i)
      if (exported_size(sizes[i]).number == number && !exported_size(sizes[i]).expression.empty() &&
          (i == place || !found)) {
        found = &sizes[i];
        if (i == place) return *found;
      }
    if (place < sizes.size() && exported_size(sizes[place]).number == number) return sizes[place];
  }
  return found ? *found : json{{"as_int", number}};
}

json description(const at::Tensor& t, const std::vector<const json*>& operands) {
  json sizes = json::array(), strides = json::array();
  for (size_t i = 0; i < t.sizes().size(); ++i) {
    sizes.push_back(size_as_in(operands, "sizes", i, t.sizes()[i]));
    strides.push_back(size_as_in(operands, "strides", i, t.strides()[i]));
  }
  const json device = operands.empty() ? json{{"type", "cpu"}, {"index", nullptr}} : operands[0]->at("device");
  return {{"dtype", exported_dtype(t.scalar_type())},
          {"sizes", sizes},
          {"requires_grad", false},
          {"device", device},
          {"strides", strides},
          {"storage_offset", {{"as_int", 0}}},
          {"layout", exported_layout(static_cast<int64_t>(c10::kStrided))}};
}

}  // namespace

ExportedSize exported_size(const json& size) {
  if (size.contains("as_int")) return {size.at("as_int").get<int64_t>(), ""};
  const json& expression = size.at("as_expr");
  ExportedSize known{0, expression.at("expr_str").get<std::string>()};
  if (const auto hint = expression.find("hint"); hint != expression.end() && !hint->is_null())
    known.number = hint->at("as_int").get<int64_t>();
  return known;
}

void describe_results(json& graph, const json& node) {
  const auto names = names_in(node.at("outputs"));
  const auto described = [&](const std::string& name) {
    for (const char* table : {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"})
      if (graph.contains(table) && graph[table].contains(name)) return true;
    return false;
  };
  if (std::all_of(names.begin(), names.end(), described)) return;
  Call call{graph};
  const auto results = call.results(node);
  if (results.size() != names.size())
    throw std::logic_error(fmt::format("{} has another number of results", node.at("target").get<std::string>()));
  json described_now = json::object();
  for (size_t i = 0; i < names.size(); ++i)
    if (!described(names[i])) described_now[names[i]] = description(results[i], call.operands);
  graph["tensor_values"].update(described_now);
}

void describe_tensors(json& graph) {
  json& values = graph["tensor_values"];
  std::set<std::string> there;
  for (const std::string& name : names_in(graph["inputs"])) there.insert(name);
  for (const json& node : graph["nodes"]) {
    const auto names = names_in(node["outputs"]);
    there.insert(names.begin(), names.end());
    describe_results(graph, node);
  }
  for (auto it = values.begin(); it != values.end();) it = there.count(it.key()) ? std::next(it) : values.erase(it);
}

std::optional<std::vector<at::Tensor>> arguments_on_meta(const json& graph_module) {
  const json &graph = graph_module.at("graph"), &specs = graph_module.at("signature").at("input_specs");
  const json &inputs = graph.at("inputs"), &values = graph.at("tensor_values");
  std::vector<at::Tensor> arguments;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!specs.at(i).contains("user_input")) continue;
    const auto names = names_in(json::array({inputs[i]}));
    if (names.size() != 1 || !values.contains(names[0])) return std::nullopt;
    arguments.push_back(on_meta(values.at(names[0])));
  }
  return arguments;
}

}  // namespace tsmem
