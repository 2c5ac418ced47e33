#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/passes/normalize_ops.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "rewriter/error.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/module_stack.h"
#include "rewriter/graph/origin.h"
#include "rewriter/rewrite/canonical.h"

namespace tsmem {

using namespace torch::jit;
using c10::IValue;
using nlohmann::json;

namespace {

[[noreturn]] void contradiction(const std::string& what) {
  throw Error(ErrorKind::input, "The graph contradicts itself: " + what + ".");
}

void add_state(Module m, const std::string& path, const at::Tensor& tensor, bool is_buffer, const ModuleNames& names) {
  const size_t dot = path.rfind('.');
  if (dot != std::string::npos) {
    const auto parent = module_at(m, path.substr(0, dot), names);
    if (!parent) contradiction(fmt::format("'{}' is in no module", path));
    m = *parent;
  }
  const std::string name = path.substr(dot + 1);
  if (name.empty() || m.hasattr(name)) contradiction(fmt::format("two inputs have the path '{}'", path));
  m.register_parameter(name, tensor, is_buffer);
}

std::string path_of(const json& node) {
  const auto calls = module_stack(node);
  return calls.empty() ? "" : calls.back().path;
}

double number_of(const json& value) {  // infinities and NaN are written as strings
  if (value.is_number()) return value.get<double>();
  const auto text = value.get<std::string>();
  return text == "NaN" ? NAN : text.starts_with('-') ? -INFINITY : INFINITY;
}

// Python's functions of numbers, which appear where sizes are dynamic.
const std::unordered_map<std::string, const char*>& number_functions() {
  static const std::unordered_map<std::string, const char*> functions = {
      {"_operator.add", "aten::add"},       {"_operator.sub", "aten::sub"},
      {"_operator.mul", "aten::mul"},       {"_operator.truediv", "aten::div"},
      {"_operator.pow", "aten::pow"},       {"_operator.floordiv", "aten::floordiv"},
      {"_operator.mod", "aten::remainder"}, {"_operator.neg", "aten::neg"},
      {"_operator.eq", "aten::eq"},         {"_operator.ne", "aten::ne"},
      {"_operator.lt", "aten::lt"},         {"_operator.le", "aten::le"},
      {"_operator.gt", "aten::gt"},         {"_operator.ge", "aten::ge"},
      {"_operator.and_", "aten::__and__"},  {"_operator.or_", "aten::__or__"},
      {"math.ceil", "aten::ceil"},          {"math.floor", "aten::floor"},
      {"torch.sym_int", "aten::Int"},       {"torch.sym_float", "aten::Float"},
      {"torch.sym_not", "aten::__not__"},   {"torch.sym_max", "prim::max"},
      {"torch.sym_min", "prim::min"},       {"torch.sym_sum", "aten::sum"},
  };
  return functions;
}

struct Builder {
  const json& graph;
  Graph& g;
  Value* self;
  std::unordered_map<std::string, Value*> values = {};
  std::unordered_map<std::string, Value*> modules = {};  // by path

  Value* value(const std::string& name) const {
    const auto it = values.find(name);
    if (it == values.end()) contradiction(fmt::format("'{}' is used before it is made", name));
    return it->second;
  }

  void define(Value* v, const std::string& name) {
    if (!values.emplace(name, v).second) contradiction(fmt::format("'{}' is made twice", name));
    v->setDebugName(name);
  }

  Value* module(const std::string& path) {
    if (path.empty()) return self;
    Value*& known = modules[path];
    if (known) return known;
    const size_t dot = path.rfind('.');
    Value* parent = module(dot == std::string::npos ? "" : path.substr(0, dot));
    return modules[path] = g.insertGetAttr(parent, path.substr(dot == std::string::npos ? 0 : dot + 1));
  }

  Value* attribute(const std::string& path) {
    const size_t dot = path.rfind('.');
    return g.insertGetAttr(module(dot == std::string::npos ? "" : path.substr(0, dot)),
                           path.substr(dot == std::string::npos ? 0 : dot + 1));
  }

  Value* list(const TypePtr& element, const std::vector<Value*>& elements) {
    return g.insertNode(g.createList(element, elements))->output();
  }

  // A list of literals; a number where a list of n belongs stands for n of it.
  template <class F>
  Value* literals(const json& array, TypePtr element, const Argument& formal, F constant) {
    if (array.empty())
      if (const auto wanted = formal_type(formal)->cast<ListType>()) element = wanted->getElementType();
    std::vector<Value*> elements;
    for (const json& x : array) elements.push_back(constant(x));
    return list(element, elements);
  }

  static TypePtr formal_type(const Argument& formal) {
    if (const auto optional = formal.type()->cast<OptionalType>()) return optional->getElementType();
    return formal.type();
  }

  Value* symbol(const json& x, const char* literal) {
    if (x.contains("as_name")) return value(x["as_name"].get<std::string>());
    if (std::string(literal) == "as_float") return g.insertConstant(number_of(x.at(literal)));
    if (std::string(literal) == "as_bool") return g.insertConstant(x.at(literal).get<bool>());
    return g.insertConstant(x.at(literal).get<int64_t>());
  }

  Value* integer(int64_t x, const Argument& formal) {
    const TypePtr type = formal_type(formal);
    if (type->kind() == TypeKind::FloatType) return g.insertConstant(static_cast<double>(x));
    if (const auto wanted = type->cast<ListType>()) {
      const Argument element(formal.name(), wanted->getElementType());
      std::vector<Value*> elements;
      for (int32_t i = 0; i < formal.N().value_or(1); ++i) elements.push_back(integer(x, element));
      return list(wanted->getElementType(), elements);
    }
    return g.insertConstant(x);
  }

  // Null for what TorchScript can't express.
  Value* argument(const json& a, const Argument& formal) {
    if (!a.is_object() || a.size() != 1) contradiction("an argument has no type");
    const std::string& kind = a.begin().key();
    const json& v = a.begin().value();
    if (kind == "as_none") return g.insertConstant(IValue());
    if (kind == "as_tensor") return value(v["name"]);
    if (kind == "as_tensors")
      return literals(v, TensorType::get(), formal, [&](const json& t) { return value(t["name"]); });
    if (kind == "as_optional_tensor") return argument(v, formal);
    if (kind == "as_optional_tensors")
      return literals(v, OptionalType::ofTensor(), formal, [&](const json& t) { return argument(t, formal); });
    if (kind == "as_int") return integer(v.get<int64_t>(), formal);
    if (kind == "as_ints") {
      const auto wanted = formal_type(formal)->cast<ListType>();
      const Argument element(formal.name(), wanted ? wanted->getElementType() : TypePtr(IntType::get()));
      return literals(v, element.type(), formal, [&](const json& x) { return integer(x.get<int64_t>(), element); });
    }
    if (kind == "as_float") return g.insertConstant(number_of(v));
    if (kind == "as_floats")
      return literals(v, FloatType::get(), formal, [&](const json& x) { return g.insertConstant(number_of(x)); });
    if (kind == "as_bool") return g.insertConstant(v.get<bool>());
    if (kind == "as_bools")
      return literals(v, BoolType::get(), formal, [&](const json& x) { return g.insertConstant(x.get<bool>()); });
    if (kind == "as_string") return g.insertConstant(v.get<std::string>());
    if (kind == "as_strings")
      return literals(v, StringType::get(), formal,
                      [&](const json& x) { return g.insertConstant(x.get<std::string>()); });
    if (kind == "as_sym_int") return symbol(v, "as_int");
    if (kind == "as_sym_ints")
      return literals(v, IntType::get(), formal, [&](const json& x) { return symbol(x, "as_int"); });
    if (kind == "as_sym_float") return symbol(v, "as_float");
    if (kind == "as_sym_floats")
      return literals(v, FloatType::get(), formal, [&](const json& x) { return symbol(x, "as_float"); });
    if (kind == "as_sym_bool") {
      // To TorchScript a bool is no number (aten::_assert_scalar).
      Value* truth = symbol(v, "as_bool");
      return formal_type(formal)->kind() == TypeKind::NumberType ? g.insert(aten::Int, {truth}) : truth;
    }
    if (kind == "as_sym_bools")
      return literals(v, BoolType::get(), formal, [&](const json& x) { return symbol(x, "as_bool"); });
    if (kind == "as_scalar_type") return g.insertConstant(static_cast<int64_t>(dtype_of(v.get<int64_t>())));
    if (kind == "as_layout") return g.insertConstant(layout_of(v.get<int64_t>()));
    if (kind == "as_memory_format") return g.insertConstant(memory_format_of(v.get<int64_t>()));
    if (kind == "as_device") {
      c10::Device device(v["type"].get<std::string>());
      if (v.contains("index") && v["index"].is_number()) device.set_index(v["index"].get<c10::DeviceIndex>());
      return g.insertConstant(device);
    }
    if (kind == "as_complex") return g.insertConstant(c10::complex<double>(number_of(v["real"]), number_of(v["imag"])));
    return nullptr;
  }

  // Whether a tensor, or a number in its place, stands where the operator takes one. A graph where it doesn't is wrong,
  // and not one that TorchScript can't express.
  static bool fits(const Value* v, const Argument& formal) {
    const bool is_tensor = v->type()->kind() == TypeKind::TensorType;
    if (formal_type(formal)->kind() != TypeKind::TensorType) return !is_tensor;
    return is_tensor || v->mustBeNone() || v->type()->isSubtypeOf(*NumberType::get()) ||
           v->type()->kind() == TypeKind::BoolType;
  }

  // All arguments of an operator, those that are not given by their defaults; nullopt where one can't be expressed.
  std::optional<std::vector<Value*>> arguments(const json& node, const FunctionSchema& schema) {
    const json& given = node["inputs"];
    std::vector<Value*> all;
    size_t used = 0;
    for (const Argument& formal : schema.arguments()) {
      const auto it =
          std::find_if(given.begin(), given.end(), [&](const json& a) { return a["name"] == formal.name(); });
      if (it != given.end()) {
        ++used;
        Value* v = argument((*it)["arg"], formal);
        if (!v) return std::nullopt;
        if (!fits(v, formal))
          contradiction(fmt::format("{} is given another '{}' than it takes", schema.name(), formal.name()));
        all.push_back(v);
      } else if (formal.default_value()) {
        all.push_back(g.insertConstant(*formal.default_value()));
      } else {
        contradiction(fmt::format("{} has no argument '{}'", schema.name(), formal.name()));
      }
    }
    if (used != given.size()) contradiction(fmt::format("{} is given an argument that it doesn't take", schema.name()));
    return all;
  }

  TypePtr type_of(const std::string& name) const {
    for (const auto& [table, type] : {std::pair<const char*, TypePtr>{"sym_int_values", IntType::get()},
                                      {"sym_float_values", FloatType::get()},
                                      {"sym_bool_values", BoolType::get()}})
      if (graph.contains(table) && graph[table].contains(name)) return type;
    return TensorType::get();
  }

  Node* opaque(const json& node) {
    std::vector<Value*> inputs;
    for (const std::string& name : names_in(node["inputs"])) inputs.push_back(value(name));
    const auto outputs = names_in(node["outputs"]);
    Node* n = g.insertNode(g.create(opaque_symbol(), inputs, outputs.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      n->output(i)->setType(type_of(outputs[i]));
      define(n->output(i), outputs[i]);
    }
    return n;
  }

  // Null where there is no such function of these numbers.
  Node* function_of_numbers(const json& node) {
    const auto known = number_functions().find(node["target"].get<std::string>());
    if (known == number_functions().end()) return nullptr;
    std::vector<NamedValue> operands;
    static const Argument any("", AnyType::get());
    for (const json& a : node["inputs"]) operands.emplace_back(argument(a["arg"], any));
    try {
      Value* out = g.insert(Symbol::fromQualString(known->second), operands);
      const auto names = names_in(node["outputs"]);
      if (names.size() != 1) return nullptr;
      define(out, names[0]);
      return out->node();
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  void name_outputs(Node* n, const json& outputs) {
    if (outputs.size() > n->outputs().size())
      contradiction(fmt::format("{} has more results than its schema", n->kind().toQualString()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const json& out = outputs[i];
      const auto names = names_in(json::array({out}));
      if (!out.contains("as_tensors")) {
        if (!names.empty()) define(n->output(i), names[0]);
        continue;
      }
      Node* unpack = g.insertNode(g.create(prim::ListUnpack, {n->output(i)}, names.size()));
      for (size_t k = 0; k < names.size(); ++k) {
        unpack->output(k)->setType(TensorType::get());
        define(unpack->output(k), names[k]);
      }
    }
  }

  // Of an operator that PyTorch has under two names the one that TorchScript's compiler and tracer write: cat of
  // concat.
  static Symbol own_name(Symbol name) {
    const auto one_node = std::make_shared<Graph>();
    one_node->insertNode(one_node->create(name, 0));
    NormalizeOps(one_node);
    return one_node->nodes().begin()->kind();
  }

  static const FunctionSchema& under_its_own_name(const FunctionSchema& schema) {
    const Symbol name = Symbol::fromQualString(schema.name()), own = own_name(name);
    if (own != name)
      for (const auto& overload : getAllOperatorsFor(own))
        if (overload->schema().arguments() == schema.arguments() && overload->schema().returns() == schema.returns())
          return overload->schema();
    return schema;
  }

  // Null where TorchScript can't express it.
  Node* operation(const json& node) {
    const OperatorOverload op = operator_of(node["target"].get<std::string>());
    if (op.name.empty()) return nullptr;
    const auto handle = c10::Dispatcher::singleton().findSchema({op.name, op.overload});
    if (!handle)
      throw Error(ErrorKind::input,
                  fmt::format("The graph calls {}{}{}, which is not registered: load the library that defines it, or, "
                              "where Python does, call tsmem.rewrite in a process that has imported that.",
                              op.name, op.overload.empty() ? "" : ".", op.overload));
    const FunctionSchema& schema = under_its_own_name(handle->schema());
    const auto inputs = arguments(node, schema);
    if (!inputs) return nullptr;
    Node* n = g.insertNode(g.create(Symbol::fromQualString(schema.name()), *inputs, schema.returns().size()));
    for (size_t i = 0; i < schema.returns().size(); ++i) n->output(i)->setType(schema.returns()[i].type());
    if (!n->maybeOperator()) {
      n->destroy();
      return nullptr;
    }
    name_outputs(n, node["outputs"]);
    return n;
  }

  void add(const json& node, int64_t index) {
    // What export has known of a tensor's dtype and device, asserted again at each cast.
    if (node["target"] == "torch.ops.aten._assert_tensor_metadata.default") return;
    Node* n = node["target"].get<std::string>().starts_with("torch.ops.") ? operation(node) : function_of_numbers(node);
    // To TorchScript it is an operation, of whose result nothing is known, and its derivative draws.
    if (n && drops_nothing(n)) {
      for (const std::string& name : names_in(node["outputs"])) values[name] = n->input(0);
      return n->destroy();
    }
    set_origin(n ? n : opaque(node), index, path_of(node));
  }

  // A result that nothing uses, of an operator that draws random numbers or updates statistics: where operators run one
  // by one it runs, and where TorchScript runs them it would not.
  static bool has_an_effect(Node* n) {
    if (n->hasUses() || n->outputs().empty()) return false;
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || schema->is_mutable() || is_opaque(n)) return false;
    if (n->kind() == aten::batch_norm || n->kind() == aten::instance_norm) return true;
    const auto handle = c10::Dispatcher::singleton().findSchema({schema->name(), schema->overload_name()});
    return handle && handle->hasTag(at::Tag::nondeterministic_seeded);
  }

  void finish() {
    std::vector<Value*> results;
    std::unordered_set<const Node*> used;
    for (const std::string& name : names_in(graph["outputs"])) {
      results.push_back(value(name));
      used.insert(results.back()->node());
    }
    const auto own = static_cast<int64_t>(results.size());
    for (Node* n : g.nodes())
      if (!used.count(n) && has_an_effect(n))
        for (Value* v : n->outputs())
          if (v->type()->isSubtypeOf(*TensorType::get())) results.push_back(v);
    Node* tuple = g.insertNode(g.createTuple(results));
    set_own_results(tuple, own);
    g.registerOutput(tuple->output());
  }
};

}  // namespace

Module module_of_graph(const json& graph_module, const StateOf& state) {
  try {
    const json &graph = graph_module.at("graph"), &specs = graph_module.at("signature").at("input_specs");
    const json& inputs = graph.at("inputs");
    if (inputs.size() != specs.size()) contradiction("its signature has another number of inputs");
    const ModuleNames class_names(graph);
    Module root(class_names.of(""), std::make_shared<CompilationUnit>(), /*shouldMangle=*/true);
    root.register_attribute("training", BoolType::get(), true);
    std::vector<std::pair<std::string, std::string>> attributes;  // name, path
    std::vector<std::string> arguments;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto names = names_in(json::array({inputs[i]}));
      const json& spec = specs[i];
      const auto take = [&](const char* kind, const char* path) {
        if (!spec.contains(kind)) return false;
        const auto& where = spec[kind].at(path).get_ref<const std::string&>();
        add_state(root, where, state(where), std::string(kind) != "parameter", class_names);
        attributes.emplace_back(names.at(0), where);
        return true;
      };
      if (take("parameter", "parameter_name") || take("buffer", "buffer_name") ||
          take("tensor_constant", "tensor_constant_name"))
        continue;
      arguments.insert(arguments.end(), names.begin(), names.end());
    }
    auto body = std::make_shared<Graph>();
    Value* self = body->addInput("self")->setType(root.type());
    Builder builder{graph, *body, self};
    for (const std::string& name : arguments) builder.define(body->addInput()->setType(builder.type_of(name)), name);
    for (const auto& [name, path] : attributes) builder.define(builder.attribute(path), name);
    int64_t index = 0;
    for (const json& node : graph.at("nodes")) builder.add(node, index++);
    builder.finish();
    body->lint();
    auto unit = root._ivalue()->compilation_unit();
    root.type()->addMethod(unit->create_function(c10::QualifiedName(*root.type()->name(), "forward"), body));
    return root;
  } catch (const json::exception& e) {
    throw Error(ErrorKind::input, fmt::format("The graph is not as torch.export writes it: {}.", e.what()));
  }
}

}  // namespace tsmem
