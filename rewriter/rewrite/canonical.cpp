#include "rewriter/rewrite/canonical.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>

#include <unordered_map>

#include "ops/act_table.h"
#include "ops/cheap_table.h"

namespace tsmem {

using namespace torch::jit;

namespace {

std::optional<double> number(const Value* v) {
  auto c = toIValue(v);
  if (!c || !c->isScalar() || c->toScalar().isComplex()) return std::nullopt;
  return c->toScalar().toDouble();
}

// Spellings of activations, without the trailing underscore of in-place ones: PyTorch's operators in the order of our
// arguments (ops/act_table.h), and what is short for one. clamp, clamp_min and clip are not among them: their gradient
// at the border is 1 before torch 2.14, that of relu and hardtanh 0 (derivatives.yaml), and that of a NaN differs too.
const std::unordered_map<std::string, KnownActivation>& activations() {
  static const auto table = [] {
    std::unordered_map<std::string, KnownActivation> spellings = {
        {"relu6", {"hardtanh", {0, 6}}},
        {"selu", {"elu", {1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1}}},
    };
    for (const ActInfo& info : kActivations)
      if (info.operator_name && !info.approximate)
        spellings.try_emplace(info.operator_name, KnownActivation{info.name, {}, static_cast<size_t>(info.arguments)});
    return spellings;
  }();
  return table;
}

// gelu and celu have arguments that are not those of our activation.
bool is_activation(const std::string& base) { return activations().count(base) || base == "gelu" || base == "celu"; }

void describe_activation(Node* n, const std::string& base, CanonicalOp& op) {
  op.name = "act";
  op.inputs = {n->input(0)};
  if (base == "gelu") {
    const std::optional<IValue> approximate =
        n->inputs().size() > 1 ? toIValue(n->input(1)) : std::optional<IValue>("none");
    if (!approximate || !approximate->isString())
      op.trouble = "the approximation of gelu is not a constant";
    else
      op.act = approximate->toStringRef() == "tanh" ? "gelu_tanh" : "gelu";
    return;
  }
  if (base == "celu") {  // at::celu: elu(x, alpha, 1, 1 / alpha)
    op.act = "elu";
    auto alpha = number(n->input(1));
    if (alpha && *alpha != 0)
      op.act_args = {*alpha, 1, 1 / *alpha};
    else
      op.trouble = "alpha of celu is not a constant";
    return;
  }
  const KnownActivation& a = activations().at(base);
  op.act = a.act;
  op.act_args = a.fixed;
  for (size_t i = 1; i <= a.from_inputs; ++i) {
    auto value = number(n->input(i));
    if (!value) {
      op.trouble = fmt::format("argument {} of {} is not a constant", i, base);
      return;
    }
    op.act_args.push_back(*value);
  }
}

// Whether PyTorch's own backward of this pad keeps its input: constant and circular ones keep sizes alone.
bool pad_keeps_input(const std::string& mode, const Node* n) {
  return n->input(3)->type()->kind() == TypeKind::NoneType && (mode == "reflect" || mode == "replicate");
}

}  // namespace

bool is_tensor(const Value* v) { return v->type()->isSubtypeOf(*TensorType::get()); }

std::optional<KnownActivation> known_activation(const std::string& name) {
  if (name == "gelu" || name == "gelu_tanh") return KnownActivation{name, {}, 0};
  const auto found = activations().find(name);
  if (found == activations().end()) return std::nullopt;
  return found->second;
}

// An operator of another library, with a schema: its qualified name.
static CanonicalOp of_another_library(Node* n) {
  CanonicalOp op;
  if (n->kind().is_prim() || n->kind().ns().toUnqualString() == std::string("tsmem") || !n->maybeSchema()) return op;
  op.name = n->kind().toQualString();
  op.inputs = n->inputs().vec();
  return op;
}

CanonicalOp canonical(Node* n) {
  CanonicalOp op;
  if (n->outputs().empty()) return op;
  if (!n->kind().is_aten()) return of_another_library(n);
  std::string base = n->kind().toUnqualString();
  // add_, relu_: one trailing underscore. __and__ and the like have two.
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') {
    base.pop_back();
    op.in_place = true;
  }
  if (is_activation(base)) {
    if (!is_tensor(n->input(0))) return {};
    describe_activation(n, base, op);
    if (op.in_place && op.trouble.empty() && (op.act == "leaky_relu" || op.act == "elu") && op.act_args.at(0) < 0)
      op.trouble = "PyTorch's backward raises an error for an in-place one with a negative slope";
    return op;
  }
  if (base == "add" || base == "mul") {
    if (n->inputs().size() < 2 || !is_tensor(n->input(0))) return {};
    const bool by_number = n->input(1)->type()->isSubtypeOf(*NumberType::get());
    if (!by_number && !is_tensor(n->input(1))) return {};
    op.name = by_number ? base + "_number" : base;
    op.inputs = {n->input(0), n->input(1)};
    if (base == "add" && n->inputs().size() > 2 && number(n->input(2)) != 1.0)
      op.trouble = "the addition has a factor (alpha)";
    return op;
  }
  // Arithmetic of numbers.
  if (!n->inputs().empty() && n->input(0)->type()->isSubtypeOf(*NumberType::get()) &&
      n->output(0)->type()->isSubtypeOf(*NumberType::get()))
    return {};
  if (base == "pad") {
    const auto mode = n->inputs().size() == 4 ? toIValue(n->input(2)) : std::nullopt;
    if (!mode || !mode->isString()) return {};
    if (mode->toStringRef() == "constant") {
      op.name = "constant_pad_nd";
      op.inputs = {n->input(0), n->input(1), n->input(3)};
      return op;
    }
    if (!pad_keeps_input(mode->toStringRef(), n)) return {};
  }
  if (base == "rrelu" && op.in_place) return {};  // its result has its argument's strides, ours is contiguous
  op.name = base;
  op.inputs = n->inputs().vec();
  return op;
}

// An operator with a derivative, or with kernels of its own, whose schema has no alias: PyTorch's tests hold it to that
// (tools/autograd/gen_variable_type.py). Composite ones they don't.
static bool is_fresh_by_schema(const Node* n) {
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || !only_reads(n)) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(schema->operator_name());
  return op && !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

bool makes_fresh_tensor(const Node* n) {
  // Composite operators that are known: dropout, type_as, pad and others may return their input without saying so.
  static const std::set<std::string> known = {"conv1d",
                                              "conv2d",
                                              "conv3d",
                                              "conv_transpose1d",
                                              "conv_transpose2d",
                                              "conv_transpose3d",
                                              "_convolution",
                                              "_convolution_mode",
                                              "batch_norm",
                                              "layer_norm",
                                              "group_norm",
                                              "instance_norm",
                                              "linear",
                                              "matmul",
                                              "mm",
                                              "bmm",
                                              "addmm",
                                              "baddbmm",
                                              "_grouped_mm",
                                              "add",
                                              "sub",
                                              "mul",
                                              "div",
                                              "cat",
                                              "stack",
                                              "max_pool1d",
                                              "max_pool2d",
                                              "max_pool3d",
                                              "prelu",
                                              "avg_pool1d",
                                              "avg_pool2d",
                                              "avg_pool3d",
                                              "mean",
                                              "sum",
                                              "softmax",
                                              "log_softmax",
                                              "cross_entropy_loss",
                                              "pad",
                                              "repeat",
                                              "scaled_dot_product_attention",
                                              "_native_multi_head_attention",
                                              "upsample_nearest2d",
                                              "upsample_bilinear2d",
                                              "exp",
                                              "sqrt",
                                              "rsqrt",
                                              "pow",
                                              "clone",
                                              "zeros_like",
                                              "ones_like",
                                              "randn_like",
                                              "rand_like",
                                              "empty_like",
                                              "full",
                                              "full_like",
                                              "empty",
                                              "new_empty",
                                              "new_full",
                                              "new_ones",
                                              "new_zeros",
                                              "arange",
                                              "max",
                                              "min",
                                              "argmax",
                                              "argmin",
                                              "topk",
                                              "zeros",
                                              "ones",
                                              "randn",
                                              "rand",
                                              "embedding"};
  static const std::set<std::string> fresh = [] {
    std::set<std::string> all = known;
    for (const CheapOp& op : kCheapOps)
      if (op.in_place) all.insert(std::string(op.name()));
    return all;
  }();
  const std::string name = n->kind().toUnqualString();
  return n->kind().is_aten() && (fresh.count(name) || is_activation(name) || is_fresh_by_schema(n));
}

bool is_dropout(c10::Symbol kind) {
  return kind == aten::dropout || kind == aten::feature_dropout || kind == aten::alpha_dropout ||
         kind == aten::feature_alpha_dropout;
}

bool drops_nothing(const Node* n) {
  std::string name = n->kind().toQualString();
  if (name.ends_with('_')) name.pop_back();
  return is_dropout(Symbol::fromQualString(name)) && toIValue(n->input(1)) == c10::IValue(0.0);
}

bool may_give_its_argument(const Node* n) {
  // Composite operators, which PyTorch does not hold to their schemas, and what else gives a tensor or a view of it on.
  static const std::set<std::string> known = {"type_as",
                                              "pad",
                                              "sum_to_size",
                                              "einsum",
                                              "atleast_1d",
                                              "atleast_2d",
                                              "atleast_3d",
                                              "broadcast_tensors",
                                              "meshgrid",
                                              "cartesian_prod",
                                              "chain_matmul",
                                              "align_as",
                                              "align_tensors",
                                              "conj_physical",
                                              "data",
                                              "to_dense",
                                              "dequantize",
                                              "unsafe_chunk",
                                              "unsafe_split",
                                              "unsafe_split_with_sizes",
                                              "_unsafe_view",
                                              "_cast_Byte",
                                              "_cast_Char",
                                              "_cast_Double",
                                              "_cast_Float",
                                              "_cast_Half",
                                              "_cast_Int",
                                              "_cast_Long",
                                              "_cast_Short",
                                              "native_dropout",
                                              "channel_shuffle",
                                              "pixel_shuffle",
                                              "pixel_unshuffle",
                                              "unflatten_dense_tensors",
                                              "flatten_dense_tensors",
                                              "_embedding_bag",
                                              "_embedding_bag_forward_only",
                                              "lu_unpack",
                                              "q_per_channel_scales",
                                              "q_per_channel_zero_points",
                                              "lift",
                                              "lift_fresh_copy"};
  return n->kind().is_aten() && (is_dropout(n->kind()) || known.count(n->kind().toUnqualString()));
}

bool gives_part_of_first(const Node* n) {
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || !n->kind().is_aten() || may_give_its_argument(n) || schema->returns().size() != 1 ||
      !schema->returns()[0].alias_info())
    return false;
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if ((arguments[i].alias_info() != nullptr) != (i == 0)) return false;
  return true;
}

bool only_reads(const Node* n) {
  static const std::set<Symbol> questions = {prim::dtype, prim::device, prim::layout, prim::requires_grad};
  if (questions.count(n->kind())) return true;
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || !n->blocks().empty() || !n->kind().is_aten() || may_give_its_argument(n)) return false;
  for (const auto& a : schema->arguments())
    if (a.alias_info()) return false;
  for (const auto& r : schema->returns())
    if (r.alias_info()) return false;
  return true;
}

}  // namespace tsmem
