#include "rewriter/graph/check_exported.h"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "rewriter/graph/exported_schema.h"

namespace tsmem {
namespace {

using nlohmann::json;
using Check = bool (*)(const json&);

bool has(const json& v, const char* key, Check check) { return v.is_object() && v.contains(key) && check(v[key]); }
bool all(const json& v, Check check) { return v.is_array() && std::all_of(v.begin(), v.end(), check); }
bool each(const json& v, Check check) { return v.is_object() && std::all_of(v.begin(), v.end(), check); }

bool is_text(const json& v) { return v.is_string(); }
bool is_flag(const json& v) { return v.is_boolean(); }
bool is_integer(const json& v) { return v.is_number_integer(); }
bool is_real(const json& v) { return v.is_number() || v == "NaN" || v == "Infinity" || v == "-Infinity"; }
bool is_array(const json& v) { return v.is_array(); }
bool is_object(const json& v) { return v.is_object(); }
bool is_named(const json& v) { return has(v, "name", is_text); }
bool is_device(const json& v) {
  if (!has(v, "type", is_text)) return false;
  try {
    const c10::Device device(v["type"].get<std::string>());
    return !device.has_index();
  } catch (const c10::Error&) {
    return false;
  }
}
bool is_complex(const json& v) { return has(v, "real", is_real) && has(v, "imag", is_real); }

// A number, or the name of one.
bool is_symbol(const json& v) {
  return v.is_object() && v.size() == 1 &&
         (has(v, "as_name", is_text) || has(v, "as_int", is_integer) || has(v, "as_float", is_real) ||
          has(v, "as_bool", is_flag));
}

// A number, or an expression of symbols.
bool is_size(const json& v) {
  if (has(v, "as_int", is_integer)) return true;
  if (!has(v, "as_expr", is_object) || !has(v["as_expr"], "expr_str", is_text)) return false;
  const json& expression = v["as_expr"];
  return !expression.contains("hint") || expression["hint"].is_null() || is_object(expression["hint"]);
}

bool is_argument(const json& v);
bool is_graph(const json& graph);

bool is_optional_tensor(const json& v) {
  return v.is_object() && v.size() == 1 && (has(v, "as_tensor", is_named) || v.contains("as_none"));
}

const std::map<std::string, Check>& kinds() {
  static const std::map<std::string, Check> checks = {
      {"as_tensor", is_named},
      {"as_tensors", [](const json& v) { return all(v, is_named); }},
      {"as_nested_tensors", [](const json& v) { return all(v, [](const json& list) { return all(list, is_named); }); }},
      {"as_optional_tensor", is_optional_tensor},
      {"as_optional_tensors", [](const json& v) { return all(v, is_optional_tensor); }},
      {"as_int", is_integer},
      {"as_ints", [](const json& v) { return all(v, is_integer); }},
      {"as_float", is_real},
      {"as_floats", [](const json& v) { return all(v, is_real); }},
      {"as_bool", is_flag},
      {"as_bools", [](const json& v) { return all(v, is_flag); }},
      {"as_string", is_text},
      {"as_strings", [](const json& v) { return all(v, is_text); }},
      {"as_sym_int", is_symbol},
      {"as_sym_ints", [](const json& v) { return all(v, is_symbol); }},
      {"as_sym_float", is_symbol},
      {"as_sym_floats", [](const json& v) { return all(v, is_symbol); }},
      {"as_sym_bool", is_symbol},
      {"as_sym_bools", [](const json& v) { return all(v, is_symbol); }},
      {"as_scalar_type", is_integer},
      {"as_layout", is_integer},
      {"as_memory_format", is_integer},
      {"as_device", is_device},
      {"as_complex", is_complex},
      {"as_custom_obj", is_named},
      {"as_graph", [](const json& v) { return is_named(v) && has(v, "graph", is_graph); }},
      {"as_string_to_argument", [](const json& v) { return each(v, is_argument); }},
  };
  return checks;
}

// Of a kind that is not known here, too: such a node stays as it is.
bool is_argument(const json& v) {
  if (!v.is_object() || v.size() != 1) return false;
  const auto known = kinds().find(v.begin().key());
  return known == kinds().end() || known->second(v.begin().value());
}

bool is_named_argument(const json& v) { return is_named(v) && has(v, "arg", is_argument); }

bool is_node(const json& v) {
  return has(v, "target", is_text) && v.contains("inputs") && all(v["inputs"], is_named_argument) &&
         v.contains("outputs") && all(v["outputs"], is_argument) &&
         (!v.contains("metadata") || each(v["metadata"], is_text));
}

bool is_description(const json& v) {
  return has(v, "sizes", is_array) && all(v["sizes"], is_size) && has(v, "strides", is_array) &&
         all(v["strides"], is_size) && v["sizes"].size() == v["strides"].size() && has(v, "dtype", is_integer) &&
         has(v, "device", is_device) && has(v, "layout", is_integer);
}

bool is_input_spec(const json& v) {
  if (!v.is_object() || v.size() != 1) return false;
  const json& spec = v.begin().value();
  for (const auto& [kind, path] : {std::pair("parameter", "parameter_name"),
                                   {"buffer", "buffer_name"},
                                   {"tensor_constant", "tensor_constant_name"}})
    if (v.contains(kind)) return has(spec, path, is_text);
  return spec.is_object();
}

// What is read from the state is a tensor.
bool fits(const json& spec, const json& input) {
  for (const char* kind : {"parameter", "buffer", "tensor_constant"})
    if (spec.contains(kind)) return input.contains("as_tensor");
  return true;
}

bool is_output_spec(const json& v) {
  return v.is_object() && v.size() == 1 && has(v.begin().value(), "arg", is_object);
}

// A mutation's tensor stands there without its kind.
size_t names_of_spec(const json& spec) {
  const json& argument = spec.begin().value()["arg"];
  return argument.contains("name") ? 1 : is_argument(argument) ? names_in(json::array({argument})).size() : 0;
}

bool is_graph(const json& graph) {
  if (!is_object(graph)) return false;
  for (const char* arguments : {"inputs", "outputs"})
    if (!graph.contains(arguments) || !all(graph[arguments], is_argument)) return false;
  if (!graph.contains("nodes") || !all(graph["nodes"], is_node)) return false;
  if (!graph.contains("tensor_values") || !each(graph["tensor_values"], is_description)) return false;
  for (const char* table : {"sym_int_values", "sym_float_values", "sym_bool_values"})
    if (graph.contains(table) && !is_object(graph[table])) return false;
  return !graph.contains("sym_int_values") || each(graph["sym_int_values"], is_size);
}

}  // namespace

bool is_graph_module(const json& graph_module) {
  if (!has(graph_module, "graph", is_object) || !has(graph_module, "signature", is_object)) return false;
  const json &graph = graph_module["graph"], &signature = graph_module["signature"];
  if (!is_graph(graph)) return false;
  if (!signature.contains("input_specs") || !all(signature["input_specs"], is_input_spec)) return false;
  if (!signature.contains("output_specs") || !all(signature["output_specs"], is_output_spec)) return false;
  const json &inputs = signature["input_specs"], &outputs = signature["output_specs"];
  if (inputs.size() != graph["inputs"].size()) return false;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!fits(inputs[i], graph["inputs"][i])) return false;
  size_t names = 0;
  for (const json& spec : outputs) names += names_of_spec(spec);
  return names == names_in(graph["outputs"]).size();
}

}  // namespace tsmem
