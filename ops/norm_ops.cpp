#include "norm_ops.h"

#include <c10/core/DispatchKeySet.h>

#include "raw_op.h"
#include "registration.h"

namespace tsmem {

using at::Tensor;

namespace {

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

using ForwardOp = RawOp<Four(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                             const OptTensor& running_mean, const OptTensor& running_var, const OptTensor& other,
                             bool training, double momentum, double eps, const Act& act, bool keep_mask)>;
using ApplyOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                             const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out)>;
using BackwardOp =
    RawOp<Four(const Tensor& grad, const OptTensor& input, const OptTensor& weight, const OptTensor& bias,
               const Tensor& mean, const Tensor& invstd, const OptTensor& other, const OptTensor& mask, bool training,
               bool channels_last, const Act& act, std::array<bool, 4> want, bool overwrite_grad)>;

using GroupForwardOp = RawOp<std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& input, const OptTensor& weight, const OptTensor& bias, int64_t groups, double eps, const Act& act)>;
using GroupApplyOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                  const Tensor& mean, const Tensor& invstd, const Act& act, const OptTensor& out)>;
using GroupBackwardOp = RawOp<std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& grad, const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
    const Tensor& invstd, const Act& act, std::array<bool, 3> want, bool overwrite_grad)>;

const ForwardOp& forward_op() {
  static const ForwardOp op("tsmem::_batch_norm_act_forward");
  return op;
}

// A gradient that may be written to, which PyTorch's fallbacks for lazy negation and zeros can't do for an argument.
Tensor own_elements(const Tensor& grad) {
  return grad._is_zerotensor() ? at::zeros(grad.sizes(), grad.options()) : grad.resolve_neg();
}

// Parameters have the input's dtype, or, with a 16-bit input, are all float32: what PyTorch takes. One number a channel
// each.
bool parameters_fit(const Tensor& input, const c10::SymInt& channels, const BatchNormArgs& bn) {
  const auto dtype = input.scalar_type();
  const bool low = dtype == at::kBFloat16 || dtype == at::kHalf;
  std::optional<at::ScalarType> common;
  for (const OptTensor* t : {&bn.weight, &bn.bias, &bn.running_mean, &bn.running_var}) {
    if (!*t || !(*t)->defined()) continue;
    const Tensor& p = **t;
    if (!plain(p) || p.dim() != 1 || p.device() != input.device() || p.sym_size(0) != channels) return false;
    if (common && *common != p.scalar_type()) return false;
    common = p.scalar_type();
  }
  return !common || *common == dtype || (low && *common == at::kFloat);
}

}  // namespace

bool norm_usable(const Tensor& like, const c10::SymInt& channels, const BatchNormArgs& bn, const Act& act) {
  if (!plain(like) || !has_kernel(forward_op().handle(), like) || autocast_casts(like, act)) return false;
  const bool mean = bn.running_mean && bn.running_mean->defined(), var = bn.running_var && bn.running_var->defined();
  return mean == var && (bn.training || mean) && parameters_fit(like, channels, bn);
}

bool norm_usable(const Tensor& input, const BatchNormArgs& bn, const OptTensor& other, const Act& act) {
  if (input.dim() < 2 || input.sym_numel() == 0 || !norm_usable(input, input.sym_size(1), bn, act)) return false;
  // Other strides would be the sum's, in PyTorch's.
  return !other || (plain(*other) && other->scalar_type() == input.scalar_type() && other->device() == input.device() &&
                    other->sym_sizes() == input.sym_sizes() && other->sym_strides() == input.sym_strides());
}

Tensor aten_norm(const Tensor& input, const BatchNormArgs& bn, bool cudnn_enabled) {
  return at::batch_norm(input, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.training, bn.momentum, bn.eps,
                        cudnn_enabled);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(const Tensor& input, const BatchNormArgs& bn,
                                                        const OptTensor& other, const Act& act, bool keep_mask) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return forward_op()(input, bn.weight, bn.bias, bn.running_mean, bn.running_var, other, bn.training, bn.momentum,
                      bn.eps, act, keep_mask);
}

Tensor norm_apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                  const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& spare) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const ApplyOp op("tsmem::_batch_norm_act_apply");
  return op(input, weight, bias, mean, invstd, other, act, spare);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_forward(const Tensor& input, const OptTensor& weight,
                                                      const OptTensor& bias, int64_t groups, double eps,
                                                      const Act& act) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const GroupForwardOp op("tsmem::_group_norm_act_forward");
  return op(input, weight, bias, groups, eps, act);
}

Tensor group_norm_apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                        const Tensor& invstd, const Act& act, const OptTensor& spare) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const GroupApplyOp op("tsmem::_group_norm_act_apply");
  return op(input, weight, bias, mean, invstd, act, spare);
}

std::array<Tensor, 3> group_norm_backward(const Tensor& grad, const Tensor& input, const OptTensor& weight,
                                          const OptTensor& bias, const Tensor& mean, const Tensor& invstd,
                                          const Act& act, std::array<bool, 3> want, bool overwrite) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const GroupBackwardOp op("tsmem::_group_norm_act_backward");
  auto [x, w, b] = op(own_elements(grad), input, weight, bias, mean, invstd, act, want, overwrite);
  return {x, w, b};
}

std::array<Tensor, 4> norm_backward(const NormBackward& b, const Act& act, std::array<bool, 4> want) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const BackwardOp op("tsmem::_batch_norm_act_backward");
  auto [x, w, bias, pre] = op(own_elements(b.grad), b.input, b.weight, b.bias, b.mean, b.invstd, b.other, b.mask,
                              b.training, b.channels_last, act, want, b.overwrite_grad);
  return {x, w, bias, pre};
}

// A number a channel as a tensor that broadcasts over x.
static Tensor over_channels(const Tensor& t, int64_t dim) {
  std::vector<int64_t> sizes(dim, 1);
  sizes[1] = t.numel();
  return t.view(sizes);
}

Tensor beside_statistics(const Tensor& x) {
  const bool takes_both = x.is_cpu() || x.is_cuda() || x.is_xpu() || x.is_meta();
  return takes_both ? x : x.to(acc_type(x.scalar_type()));
}

OptTensor weight_beside(const OptTensor& weight, const OptTensor& bias) {
  return !weight && bias ? OptTensor(at::ones_like(*bias)) : weight;
}

Tensor norm_by_pytorch(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                       const Tensor& invstd, bool training, double eps, const OptTensor& other, const Act& act) {
  const auto dtype = mean.scalar_type();
  const OptTensor scale = weight_beside(weight, bias);
  const bool cudnn = at::globalContext().userEnabledCuDNN();
  Tensor x = beside_statistics(input), normed;
  const auto wide = [&](const OptTensor& t) { return t ? OptTensor(t->to(dtype)) : t; };
  if (training) {
    const bool same = x.is_same(input);
    normed = at::batch_norm(x, same ? scale : wide(scale), same ? bias : wide(bias), {}, {}, true, 0, eps, cudnn);
  } else {
    // All in the statistics' dtype, which 16-bit parameters are not.
    const bool narrow = (scale && scale->scalar_type() != dtype) || (bias && bias->scalar_type() != dtype);
    if (narrow) x = x.to(dtype);
    normed = at::batch_norm(x, wide(scale), wide(bias), mean, invstd.pow(-2), false, 0, /*eps=*/0, cudnn);
  }
  normed = normed.to(input.scalar_type());
  return aten_act(other ? normed + *other : normed, act);
}

Tensor gradient_before_masked(const NormBackward& b, const Act& act) {
  NormBackward ones = b;
  ones.grad = at::ones_like(b.grad);
  ones.overwrite_grad = false;
  return b.grad * norm_backward(ones, act, {false, false, false, true})[3];
}

std::array<Tensor, 4> differentiable_norm_backward(const NormBackward& b, const Act& act, std::array<bool, 4> want) {
  Act rest = act;
  Tensor grad = b.grad;
  if (b.mask) {
    grad = gradient_before_masked(b, act);
    rest = Act{ActKind::identity};
  }
  const bool identity = rest.kind == ActKind::identity;
  std::array<Tensor, 4> g;
  if (identity && want[3]) g[3] = grad;
  const std::array<bool, 4> through = {want[0], want[1], want[2], want[3] && !identity};
  if (std::none_of(through.begin(), through.end(), [](bool w) { return w; })) return g;
  if (b.input) {
    const auto found =
        differentiable_gradients({*b.input, kept_or_any(b.weight, want[1], b.mean, b.weight_dtype),
                                  kept_or_any(b.bias, want[2], b.mean, b.bias_dtype), value_or_undefined(b.other)},
                                 through, grad, [&](const auto& t) {
                                   return norm_by_pytorch(t[0], optional(t[1]), optional(t[2]), b.mean, b.invstd,
                                                          b.training, b.eps, optional(t[3]), rest);
                                 });
    for (int i : {0, 1, 2}) g[i] = found[i];
    if (through[3]) g[3] = found[3];
    return g;
  }
  // In evaluation, and for the bias alone, the input is not read.
  const Tensor wide = grad.to(b.mean.scalar_type());
  if (want[0]) {
    Tensor scale = b.invstd;
    if (b.weight) scale = scale * b.weight->to(scale.scalar_type());
    g[0] = (wide * over_channels(scale, grad.dim())).to(grad.scalar_type());
  }
  if (want[2]) g[2] = wide.sum_to_size(over_channels(b.mean, grad.dim()).sizes()).view({-1}).to(b.bias_dtype);
  return g;
}

void save_norm(torch::autograd::AutogradContext* ctx, const BatchNormArgs& bn, bool channels_last) {
  auto& data = ctx->saved_data;
  data["training"] = bn.training;
  data["eps"] = bn.eps;
  data["channels_last"] = channels_last;
  data["weight_dtype"] = dtype_of(bn.weight);
  data["bias_dtype"] = dtype_of(bn.bias);
}

NormBackward saved_norm(torch::autograd::AutogradContext* ctx, const Tensor& grad) {
  auto& data = ctx->saved_data;
  NormBackward b;
  b.grad = grad;
  b.training = data["training"].toBool();
  b.eps = data["eps"].toDouble();
  b.channels_last = data["channels_last"].toBool();
  b.weight_dtype = static_cast<at::ScalarType>(data["weight_dtype"].toInt());
  b.bias_dtype = static_cast<at::ScalarType>(data["bias_dtype"].toInt());
  return b;
}

Tensor kept_or_any(const OptTensor& kept, bool wanted, const Tensor& like, at::ScalarType dtype) {
  return kept || !wanted ? value_or_undefined(kept) : at::ones_like(like, dtype);
}

int64_t dtype_of(const OptTensor& t) { return t && t->defined() ? static_cast<int64_t>(t->scalar_type()) : 0; }

Tensor in_dtype(const Tensor& grad, const at::IValue& dtype) {
  return grad.defined() ? grad.to(static_cast<at::ScalarType>(dtype.toInt())) : grad;
}

void register_norm(torch::Library& m) {
  m.def(
      "_batch_norm_act_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, "
      "Tensor? other, bool training, float momentum, float eps, int act, float act_a, float act_b, float act_c, bool "
      "keep_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_backward(Tensor(a!) grad, Tensor? input, Tensor? weight, Tensor? bias, Tensor mean, Tensor "
      "invstd, "
      "Tensor? other, Tensor? mask, bool training, bool channels_last, int act, float act_a, float act_b, float act_c, "
      "bool[4] want, bool overwrite_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_group_norm_act_forward(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps, int act, float "
      "act_a, float act_b, float act_c) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_group_norm_act_apply(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, int act, float "
      "act_a, float act_b, float act_c, Tensor(a!)? out) -> Tensor");
  m.def(
      "_group_norm_act_backward(Tensor(a!) grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor "
      "invstd, int act, float act_a, float act_b, float act_c, bool[3] want, bool overwrite_grad) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "_batch_norm_act_max_pool2d_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, bool training, float momentum, float eps, int act, float act_a, float act_b, float "
      "act_c, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, int[2] out_size, bool keep_positions) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_max_pool2d_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor invstd, "
      "Tensor positions, bool training, bool channels_last, int act, float act_a, float act_b, float act_c, int[2] "
      "kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, bool[3] want) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_apply(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor? other, "
      "int act, float act_a, float act_b, float act_c, Tensor(a!)? out) -> Tensor");
  m.def(
      "_batch_norm_act_max_pool2d_apply(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "Tensor positions, int act, float act_a, float act_b, float act_c, int[2] kernel_size, int[2] stride, int[2] "
      "padding, "
      "int[2] dilation, int[2] out_size) -> Tensor");
  m.def(
      "_scale_grad(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? invstd, bool "
      "last_dim, int act, "
      "float act_a, float act_b, float act_c) -> Tensor");
  // On CUDA: which of two ways was found the faster one for each shape so far, a line each. On: any tensor there.
  m.def("_ways(Tensor on) -> str[]");
}

}  // namespace tsmem
