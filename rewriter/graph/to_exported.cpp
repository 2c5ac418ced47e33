#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "rewriter/graph/casts.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/origin.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;
using c10::IValue;
using nlohmann::json;

namespace {

json number(double x) {
  if (std::isnan(x)) return "NaN";
  if (std::isinf(x)) return x < 0 ? "-Infinity" : "Infinity";
  return x;
}

json device_json(const c10::Device& device) {
  return {{"type", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
          {"index", device.has_index() ? json(device.index()) : json(nullptr)}};
}

// A constant as an argument of that type.
json literal(const IValue& v, const TypePtr& real_type) {
  TypePtr type = real_type;
  if (const auto optional = type->cast<OptionalType>()) type = optional->getElementType();
  if (v.isNone()) return {{"as_none", true}};
  if (v.isBool()) return {{"as_bool", v.toBool()}};
  if (v.isInt()) {
    if (type->kind() == TypeKind::ScalarTypeType)
      return {{"as_scalar_type", exported_dtype(static_cast<c10::ScalarType>(v.toInt()))}};
    if (type->kind() == TypeKind::LayoutType) return {{"as_layout", exported_layout(v.toInt())}};
    if (type->kind() == TypeKind::MemoryFormatType) return {{"as_memory_format", exported_memory_format(v.toInt())}};
    return {{"as_int", v.toInt()}};
  }
  if (v.isDouble()) return {{"as_float", number(v.toDouble())}};
  if (v.isString()) return {{"as_string", v.toStringRef()}};
  if (v.isDevice()) return {{"as_device", device_json(v.toDevice())}};
  if (v.isIntList()) return {{"as_ints", v.toIntVector()}};
  if (v.isBoolList()) {
    json all = json::array();
    for (const bool x : v.toBoolList()) all.push_back(x);
    return {{"as_bools", all}};
  }
  if (v.isDoubleList()) {
    json all = json::array();
    for (const double x : v.toDoubleVector()) all.push_back(number(x));
    return {{"as_floats", all}};
  }
  throw std::logic_error(fmt::format("no argument of an exported graph is a {}", v.tagKind()));
}

struct Writer {
  const Module& module;
  const json& original;
  std::unordered_map<const Value*, std::string> names = {};
  std::unordered_map<std::string, const json*> made_by = {};  // of the original, by the name of a result
  std::unordered_set<std::string> taken = {};
  json nodes = json::array();

  void name(const Value* v, const std::string& wanted) { names[v] = unused_name(taken, wanted); }

  // A valid name of Python's.
  static std::string readable(const Value* v, const std::string& otherwise) {
    std::string text = v->hasDebugName() ? v->debugName() : otherwise;
    for (char& c : text)
      if (!isalnum(static_cast<unsigned char>(c)) && c != '_') c = '_';
    return text;
  }

  std::optional<IValue> constant(const Value* v) const {
    if (auto c = toIValue(v)) return c;
    if (v->node()->kind() == prim::GetAttr && !names.count(v))
      if (const auto path = attribute_path(v->node()->input())) {
        const IValue x = submodule(module, *path).attr(v->node()->s(attr::name));
        if (!x.isTensor() && !x.isModule()) return x;
      }
    return std::nullopt;
  }

  // Reading the graph has put it there.
  static bool is_truth_as_number(const Node* n) {
    return n->kind() == aten::Int && !origin(n) && n->input()->type()->kind() == TypeKind::BoolType;
  }

  // The values with names that an input stands for: a list for all of its elements.
  void collect(const Value* v, std::vector<std::string>& found) const {
    if (is_truth_as_number(v->node())) return collect(v->node()->input(), found);
    if (const auto it = names.find(v); it != names.end())
      found.push_back(it->second);
    else if (v->node()->kind() == prim::ListConstruct)
      for (const Value* element : v->node()->inputs()) collect(element, found);
  }

  static void replace_names(json& argument, const std::vector<std::string>& by) {
    size_t i = 0;
    for_each_name(argument, [&](json& name) {
      if (i == by.size()) throw std::logic_error("an operator of a graph has lost an argument");
      name = by[i++];
    });
    if (i != by.size()) throw std::logic_error("an operator of a graph has got an argument");
  }

  // The values of a node's results: of a list, those that it is taken apart into.
  static std::vector<const Value*> results_of(const Node* n) {
    std::vector<const Value*> results;
    for (const Value* v : n->outputs()) {
      const Node* unpack = nullptr;
      for (const Use& use : v->uses())
        if (use.user->kind() == prim::ListUnpack) unpack = use.user;
      if (unpack)
        results.insert(results.end(), unpack->outputs().begin(), unpack->outputs().end());
      else
        results.push_back(v);
    }
    return results;
  }

  // A node of the original, whose operands may have other names.
  void write_again(const Node* n, const json& before) {
    json node = before;
    const OperatorOverload op = operator_of(before["target"].get<std::string>());
    if (!is_opaque(n) && !op.name.empty()) {
      // TorchScript may have taken another overload, with the same arguments in the same order.
      const auto& formals = c10::Dispatcher::singleton().findSchema({op.name, op.overload})->schema().arguments();
      for (json& input : node["inputs"]) {
        const auto formal =
            std::find_if(formals.begin(), formals.end(), [&](const Argument& a) { return a.name() == input["name"]; });
        std::vector<std::string> found;
        collect(n->input(formal - formals.begin()), found);
        replace_names(input["arg"], found);
      }
    } else {
      std::vector<std::string> found;
      for (const Value* v : n->inputs()) collect(v, found);
      size_t from = 0;
      for (json& input : node["inputs"]) {
        const size_t count = names_in(json::array({input})).size();
        if (from + count > found.size()) throw std::logic_error("an operator of a graph has lost an argument");
        replace_names(input["arg"], {found.begin() + from, found.begin() + from + count});
        from += count;
      }
    }
    const auto results = results_of(n);
    const auto outputs = names_in(node["outputs"]);
    // A list that nothing takes apart keeps its names: nobody reads them.
    if (results.size() == outputs.size())
      for (size_t i = 0; i < results.size(); ++i) names[results[i]] = outputs[i];
    nodes.push_back(std::move(node));
  }

  json argument(const Value* v, const Argument& formal) {
    if (const auto it = names.find(v); it != names.end()) {
      switch (v->type()->kind()) {
        case TypeKind::IntType:
          return {{"as_sym_int", {{"as_name", it->second}}}};
        case TypeKind::FloatType:
          return {{"as_sym_float", {{"as_name", it->second}}}};
        case TypeKind::BoolType:
          return {{"as_sym_bool", {{"as_name", it->second}}}};
        default:
          return {{"as_tensor", {{"name", it->second}}}};
      }
    }
    if (const auto c = constant(v)) return literal(*c, formal.real_type());
    if (v->node()->kind() == prim::ListConstruct) return list(v, formal);
    throw std::logic_error(fmt::format("{} of a rewritten graph is nobody's result", v->debugName()));
  }

  json list(const Value* v, const Argument& formal) {
    const TypePtr element = v->type()->expectRef<ListType>().getElementType();
    json all = json::array();
    bool symbolic = false;
    const auto inputs = v->node()->inputs();
    for (const Value* x : inputs) symbolic |= names.count(x) > 0;
    if (element->kind() == TypeKind::TensorType) {
      for (const Value* x : inputs) all.push_back({{"name", names.at(x)}});
      return {{"as_tensors", all}};
    }
    if (element->kind() == TypeKind::OptionalType) {
      for (const Value* x : inputs) all.push_back(argument(x, formal));
      return {{"as_optional_tensors", all}};
    }
    const bool floats = element->kind() == TypeKind::FloatType, bools = element->kind() == TypeKind::BoolType;
    const std::string kind = floats ? "float" : bools ? "bool" : "int";
    for (const Value* x : inputs) {
      if (const auto it = names.find(x); it != names.end()) {
        all.push_back({{"as_name", it->second}});
        continue;
      }
      const IValue c = constant(x).value();
      const json plain = floats ? number(c.toDouble()) : bools ? json(c.toBool()) : json(c.toInt());
      all.push_back(symbolic ? json{{"as_" + kind, plain}} : plain);
    }
    return {{(symbolic ? "as_sym_" : "as_") + kind + "s", all}};
  }

  static bool is_default(const Value* v, const Argument& formal) {
    const auto c = toIValue(v);
    return c && formal.default_value() && *c == *formal.default_value();
  }

  // An operator that rewriting put there.
  void write_new(const Node* n) {
    const FunctionSchema& schema = n->schema();
    const std::string base = n->kind().toUnqualString();
    json inputs = json::array(), outputs = json::array(), metadata = json::object();
    for (size_t i = 0; i < n->inputs().size(); ++i) {
      const Argument& formal = schema.arguments()[i];
      if (formal.kwarg_only() && is_default(n->input(i), formal)) continue;
      inputs.push_back(
          {{"name", formal.name()}, {"arg", argument(n->input(i), formal)}, {"kind", formal.kwarg_only() ? 2 : 1}});
    }
    for (const Value* v : results_of(n)) {
      const std::string wanted = readable(v, base);
      if (const auto before = made_by.find(wanted); before != made_by.end())
        metadata = before->second->value("metadata", json::object());
      name(v, wanted);
      outputs.push_back(argument(v, schema.returns()[0]));
    }
    json node = {{"target", target_of({schema.name(), schema.overload_name()})},
                 {"inputs", inputs},
                 {"outputs", outputs},
                 {"metadata", metadata},
                 {"is_hop_single_tensor_return", nullptr}};
    node["name"] = outputs.size() == 1 ? names_in(outputs).at(0) : unused_name(taken, base);
    nodes.push_back(std::move(node));
  }

  void write(const Node* n) {
    if (is_truth_as_number(n)) return;
    switch (n->kind()) {
      case prim::Constant:
      case prim::GetAttr:
      case prim::ListConstruct:
      case prim::ListUnpack:
      case prim::TupleConstruct:
      case prim::CreateObject:
      case prim::CallMethod:
        return;
      case prim::Enter:
      case prim::Exit:  // a region's border
        nodes.push_back(original["graph"]["nodes"].at(static_cast<size_t>(*origin(n))));
        return;
      default:
        break;
    }
    if (const auto index = origin(n))
      write_again(n, original["graph"]["nodes"].at(static_cast<size_t>(*index)));
    else
      write_new(n);
  }
};

}  // namespace

json graph_of_module(const Module& rewritten, const json& original) {
  const auto body = function_graph(rewritten.type()->findMethod("forward"));
  Writer writer{rewritten, original};
  const json &graph = original["graph"], &specs = original["signature"]["input_specs"];
  std::unordered_map<std::string, std::string> by_path;
  size_t argument = 1;  // self is the first
  for (size_t i = 0; i < specs.size(); ++i)
    for (const std::string& name : names_in(json::array({graph["inputs"][i]}))) {
      writer.taken.insert(name);
      const auto state = [&](const char* kind, const char* path) {
        if (specs[i].contains(kind)) by_path[specs[i][kind][path].get<std::string>()] = name;
        return specs[i].contains(kind);
      };
      if (!state("parameter", "parameter_name") && !state("buffer", "buffer_name") &&
          !state("tensor_constant", "tensor_constant_name"))
        writer.names[body->inputs().at(argument++)] = name;
    }
  for (const json& node : graph["nodes"])
    for (const std::string& name : names_in(node["outputs"])) writer.made_by.emplace(name, &node);
  // Names of nodes that stay are theirs; what is new and has the same gets another.
  for (const Node* n : body->nodes())
    if (const auto index = origin(n))
      for (const std::string& name : names_in(graph["nodes"][*index]["outputs"])) writer.taken.insert(name);
  for (const Node* n : body->nodes()) {
    if (n->kind() == prim::GetAttr)
      if (const auto path = attribute_path(n->input()))
        if (const auto it = by_path.find(join_path(*path, n->s(attr::name))); it != by_path.end())
          writer.names[n->output()] = it->second;
    writer.write(n);
  }
  json result = original;
  result["graph"]["nodes"] = std::move(writer.nodes);
  const Node* outputs = body->outputs().at(0)->node();
  size_t at = 0;
  const auto rename = [&](json& arguments, bool wrapped) {
    at = 0;
    for (json& a : arguments) {
      json& inner = wrapped ? a.begin().value()["arg"] : a;
      // A spec of a mutation names its tensor without a type.
      if (inner.contains("name") && inner.size() == 1)
        inner["name"] = writer.names.at(outputs->input(at++));
      else
        for_each_name(inner, [&](json& name) { name = writer.names.at(outputs->input(at++)); });
    }
  };
  rename(result["graph"]["outputs"], false);
  if (result["signature"].contains("output_specs")) rename(result["signature"]["output_specs"], true);
  return result;
}

}  // namespace tsmem
