#include "rewriter/graph/autocast_casts.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/tensor_values.h"

namespace tsmem {
namespace {

using nlohmann::json;

c10::ScalarType dtype_in(const json& value) { return dtype_of(value.at("dtype").get<int64_t>()); }

// The description of a tensor, null for a number.
const json* described(const json& graph, const std::string& name) {
  const json& values = graph.at("tensor_values");
  const auto found = values.find(name);
  return found == values.end() ? nullptr : &*found;
}

std::string device_of(const json& value) { return value.at("device").at("type").get<std::string>(); }

bool is_cast_from(c10::ScalarType t) { return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf; }

// The device, among those that autocast is on for, of the first tensor it could cast.
std::optional<std::string> autocast_device(const json& graph, const Autocast& autocast, const json& node) {
  for (const std::string& name : names_in(node.at("inputs")))
    if (const json* value = described(graph, name);
        value && is_cast_from(dtype_in(*value)) && autocast.dtypes.count(device_of(*value)))
      return device_of(*value);
  return std::nullopt;
}

// Composed of views and one operator that may be cast: to cast the operands first is the same.
bool passes_casts_on(const c10::OperatorName& op) {
  static const std::set<std::string_view> names = {"aten::einsum", "aten::linalg_matmul", "aten::pad", "aten::square"};
  return names.count(op.name) > 0;
}

// Operators that PyTorch composes of others none of which is cast.
constexpr std::string_view kPlainCompositions =
    " absolute adaptive_avg_pool1d adaptive_avg_pool2d adjoint alpha_dropout arccos arccosh arcsin arcsinh "
    "arctan arctan2 arctanh argsort atleast_1d atleast_2d atleast_3d avg_pool1d batch_norm broadcast_tensors "
    "broadcast_to chunk clip column_stack concat concatenate contiguous diag diagflat divide dropout dsplit "
    "dstack expand_as feature_alpha_dropout feature_dropout fix flatten fliplr flipud greater greater_equal "
    "group_norm hsplit hstack instance_norm isclose isfinite layer_norm less less_equal log_sigmoid "
    "log_softmax mH mT matrix_H max max_pool1d max_pool2d meshgrid min moveaxis movedim multiply narrow "
    "negative not_equal numpy_T one_hot outer positive ravel relu6 repeat_interleave reshape reshape_as "
    "rms_norm row_stack rrelu selu softmax special_erf special_erfc special_exp2 special_expit special_expm1 "
    "special_log1p special_round special_sinc split std std_mean subtract sum_to_size swapaxes swapdims "
    "take_along_dim tensor_split tile to true_divide type_as unflatten unsafe_chunk upsample_bicubic2d "
    "upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_trilinear3d var var_mean view_as "
    "vsplit vstack where ";

// Whether no operator that is cast hides in its composition.
bool hides_nothing(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  if (name.starts_with("tsmem::") || !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return true;
  if (!name.starts_with("aten::")) return false;
  name.remove_prefix(6);
  if (name.ends_with('_')) name.remove_suffix(1);
  return kPlainCompositions.find(fmt::format(" {} ", name)) != std::string_view::npos;
}

// The dtype of the operator's first result that is no integer; that of its parts where it is complex.
std::optional<c10::ScalarType> dtype_of_result(const json& graph, const json& node) {
  for (const std::string& name : names_in(node.at("outputs")))
    if (const json* value = described(graph, name)) {
      const auto dtype = dtype_in(*value);
      if (c10::isFloatingType(dtype)) return dtype;
      if (c10::isComplexType(dtype)) return c10::toRealValueType(dtype);
    }
  return std::nullopt;
}

json cast_node(const std::string& of, const std::string& name, c10::ScalarType to, const json& metadata) {
  return {{"target", "torch.ops.aten.to.dtype"},
          {"inputs",
           {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", of}}}}}, {"kind", 1}},
            {{"name", "dtype"}, {"arg", {{"as_scalar_type", exported_dtype(to)}}}, {"kind", 1}}}},
          {"outputs", {{{"as_tensor", {{"name", name}}}}}},
          {"metadata", metadata},
          {"is_hop_single_tensor_return", nullptr},
          {"name", name}};
}

// The name of a cast of the tensor `name`, which is added to the graph; of a parameter that was cast before, of that.
std::string cast_of(Casts& casts, const std::string& name, c10::ScalarType to, bool caches, const json& metadata) {
  const std::pair<std::string, int64_t> key(name, exported_dtype(to));
  const bool once = caches && casts.parameters.count(name) > 0;
  if (once)
    if (const auto known = casts.cached.find(key); known != casts.cached.end()) return known->second;
  const json cast = cast_node(name, casts.unused_name(name + "_cast"), to, metadata);
  describe_results(casts.graph, cast);
  casts.graph["nodes"].push_back(cast);
  if (once) casts.cached[key] = cast.at("name").get<std::string>();
  return cast.at("name");
}

}  // namespace

bool add_casts(Casts& casts, const Autocast& autocast, json& node) {
  json& graph = casts.graph;
  const auto device = autocast_device(graph, autocast, node);
  const auto results = names_in(node.at("outputs"));
  const auto is_tensor = [&](const std::string& name) { return described(graph, name) != nullptr; };
  if (!device || std::none_of(results.begin(), results.end(), is_tensor)) return true;
  const OperatorOverload op = operator_of(node.at("target").get<std::string>());
  const auto handle = c10::Dispatcher::singleton().findSchema({op.name, op.overload});
  if (!handle) return false;
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(c10::Device(*device).type());
  const bool is_cast = handle->hasKernelForDispatchKey(key) || passes_casts_on(handle->operator_name());
  if (!is_cast) return hides_nothing(*handle);
  const auto to = dtype_of_result(graph, node);
  if (!to || handle->schema().is_mutable()) return false;
  if (*to != at::kFloat && *to != dtype_of(autocast.dtypes.at(*device))) return true;  // as its operands are
  for (json& input : node.at("inputs"))
    for_each_name(input.at("arg"), [&](json& operand) {
      const json* value = described(graph, operand);
      if (value && device_of(*value) == *device && is_cast_from(dtype_in(*value)) && dtype_in(*value) != *to)
        operand = cast_of(casts, operand, *to, autocast.caches, node.value("metadata", json::object()));
    });
  return true;
}

}  // namespace tsmem
