#include "rewriter/graph/autocast_casts.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "rewriter/graph/exported_schema.h"

namespace tsmem {
namespace {

using nlohmann::json;

// Names of operators between spaces. Those that autocast runs in the lower precision ...
constexpr std::string_view kLower =
    " _convolution _scaled_dot_product_flash_attention addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d "
    "conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot "
    "linalg_vecdot linear lstm_cell matmul mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell "
    "scaled_dot_product_attention ";
// ... and in the widest dtype of its operands. It runs the others on its lists in float32.
constexpr std::string_view kWidest =
    " addcdiv addcmul atan2 bilinear cat cross dot index_copy index_put scatter_add stack tensordot vdot ";

// Operators that PyTorch composes of others none of which is on the lists of the CPU or of CUDA.
constexpr std::string_view kPlainCompositions =
    " absolute adaptive_avg_pool1d adaptive_avg_pool2d adjoint alpha_dropout arccosh arcsinh arctan arctanh argsort "
    "atleast_1d atleast_2d atleast_3d avg_pool1d batch_norm broadcast_tensors broadcast_to chunk clip column_stack "
    "concat concatenate contiguous diag diagflat divide dropout dsplit dstack expand_as feature_alpha_dropout "
    "feature_dropout fix flatten fliplr flipud greater greater_equal group_norm hsplit hstack instance_norm isclose "
    "isfinite layer_norm less less_equal log_sigmoid log_softmax mH mT matrix_H max max_pool1d max_pool2d meshgrid min "
    "moveaxis movedim multiply narrow negative not_equal numpy_T one_hot outer positive ravel relu6 repeat_interleave "
    "reshape reshape_as rms_norm row_stack rrelu selu softmax special_erf special_erfc special_exp2 special_expit "
    "special_round special_sinc split std std_mean subtract swapaxes swapdims take_along_dim tensor_split tile to "
    "true_divide type_as unflatten unsafe_chunk var var_mean view_as vsplit vstack where ";

bool among(std::string_view names, const std::string& name) {
  return names.find(fmt::format(" {} ", name)) != std::string_view::npos;
}

bool is_cast_from(c10::ScalarType t) { return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf; }

// The device, among those that autocast is on for, of the first tensor that it could cast: one operator's are on one.
std::optional<std::string> autocast_device(const json& graph, const Autocast& autocast, const json& node) {
  for (const std::string& name : names_in(node.at("inputs")))
    if (const json* value = described(graph, name))
      if (const auto device = value->at("device").at("type").get<std::string>();
          is_cast_from(dtype_in(*value)) && autocast.dtypes.count(device))
        return device;
  return std::nullopt;
}

const json* argument(const json& node, const char* name) {
  for (const json& input : node.at("inputs"))
    if (input.at("name") == name) return &input.at("arg");
  return nullptr;
}

// Whether an einsum is one product of matrices: of two tensors, without letters that one of them alone has, which are
// summed before.
bool is_one_product(const json& node) {
  const json *equation = argument(node, "equation"), *tensors = argument(node, "tensors");
  if (!equation || !tensors || names_in(json::array({*tensors})).size() != 2) return false;
  const auto text = equation->value("as_string", "");
  const size_t comma = text.find(','), arrow = text.find("->");
  if (comma == text.npos || arrow == text.npos) return false;
  const std::string parts[] = {text.substr(0, comma), text.substr(comma + 1, arrow - comma - 1),
                               text.substr(arrow + 2)};
  for (size_t one : {0, 1})
    for (const char c : parts[one])
      if (c != ' ' && c != '.' && parts[1 - one].find(c) == std::string::npos && parts[2].find(c) == std::string::npos)
        return false;
  return true;
}

// The operator that is cast in one that PyTorch composes of views and it, or of several that are cast alike: to cast
// the operands first is the same. The operator itself where it is none of these; "" where it is nothing that is cast or
// not known.
std::string cast_part(const std::string& name, const json& node) {
  static const std::map<std::string, std::string> other_names = {
      {"arccos", "acos"},          {"arcsin", "asin"}, {"cross_entropy_loss", "nll_loss"}, {"linalg_matmul", "matmul"},
      {"nll_loss_nd", "nll_loss"}, {"square", "pow"},  {"special_expm1", "expm1"},         {"special_log1p", "log1p"}};
  if (const auto other = other_names.find(name); other != other_names.end()) return other->second;
  if (name == "einsum") return is_one_product(node) ? "bmm" : "";
  if (name != "pad") return name;
  const json *mode = argument(node, "mode"), *sizes = argument(node, "pad");
  const std::string how = mode ? mode->value("as_string", "") : "constant";
  if (!sizes || (how != "reflect" && how != "replicate")) return "";
  const size_t numbers =
      std::max(sizes->value("as_ints", json::array()).size(), sizes->value("as_sym_ints", json::array()).size());
  return fmt::format("{}_pad{}d", how == "reflect" ? "reflection" : "replication", numbers / 2);
}

// Whether an overload of an operator is on autocast's lists.
bool is_listed(const std::string& name, c10::DispatchKey key) {
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::aten(name)))
    if (const auto handle = c10::Dispatcher::singleton().findSchema(op->schema().operator_name()))
      if (handle->hasKernelForDispatchKey(key)) return true;
  return false;
}

// Whether no operator that is cast hides in one that is not on the lists itself.
bool hides_nothing(const c10::OperatorHandle& op, const std::string& name, const json& node) {
  if (op.schema().name().starts_with("tsmem::")) return true;
  if (!op.schema().name().starts_with("aten::")) return false;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return !name.starts_with("linalg_") || op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (name == "einsum") return false;
  // What is composed of one operator that is not cast on this device.
  if (cast_part(name, node) != name || name.starts_with("upsample_")) return true;
  return among(kPlainCompositions, name);
}

// Without the underscore of one that overwrites.
std::string base_name(const std::string& qualified) {
  std::string name = qualified.substr(qualified.find("::") + 2);
  if (name.ends_with('_') && !name.ends_with("__")) name.pop_back();
  return name;
}

c10::ScalarType real_dtype(c10::ScalarType t) { return c10::isComplexType(t) ? c10::toRealValueType(t) : t; }

}  // namespace

bool add_casts(Casts& casts, const Autocast& autocast, const std::set<std::string>& uncertain, json& node) {
  json& graph = casts.graph;
  const auto device = autocast_device(graph, autocast, node);
  std::vector<c10::ScalarType> results;
  for (const std::string& name : names_in(node.at("outputs")))
    if (const json* value = described(graph, name)) results.push_back(real_dtype(dtype_in(*value)));
  if (!device || results.empty()) return true;
  const OperatorOverload op = operator_of(node.at("target").get<std::string>());
  const auto handle = c10::Dispatcher::singleton().findSchema({op.name, op.overload});
  if (!handle) return false;
  const auto type = c10::Device(*device).type();
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(type);
  const std::string name = base_name(op.name), part = op.name.starts_with("aten::") ? cast_part(name, node) : "";
  const bool own = handle->hasKernelForDispatchKey(key);
  // What overwrites is on no list.
  if (!own && (handle->schema().is_mutable() || part.empty() || !is_listed(part, key)))
    return hides_nothing(*handle, name, node);

  const auto low = dtype_of(autocast.dtypes.at(*device));
  auto to = among(kLower, part) ? low : at::kFloat;
  std::vector<json*> operands;
  std::optional<c10::ScalarType> widest;
  for (json& input : node.at("inputs"))
    for_each_name(input.at("arg"), [&](json& operand) {
      const json* value = described(graph, operand);
      if (!value || !is_cast_from(dtype_in(*value)) || value->at("device").at("type") != *device) return;
      operands.push_back(&operand);
      widest = widest ? c10::promoteTypes(*widest, dtype_in(*value)) : dtype_in(*value);
    });
  if (among(kWidest, part) || (part == "grid_sampler" && type != c10::kCPU)) to = widest.value();
  for (const auto result : results)
    if (c10::isFloatingType(result) && result != to) return false;
  for (json* operand : operands) {
    const auto from = dtype_in(*described(graph, *operand));
    if (from == to && !uncertain.count(*operand)) continue;
    *operand = cast_of(casts, *operand, to, autocast.caches && from == at::kFloat && to == low, node);
  }
  return true;
}

bool may_be_cast(const json& node) {
  const OperatorOverload op = operator_of(node.at("target").get<std::string>());
  return op.name != "aten::to" || op.overload == "other";
}

}  // namespace tsmem
