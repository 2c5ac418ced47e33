// act(batch_norm(input)) and act(batch_norm(input) + other).
//
// Kept for backward, decided at every call:
//   training            input (shared with the op that made it) and two numbers a channel; the activation is recomputed
//   training, + other   the same and the activation's bits, or `other` where the activation has no bits
//   eval                two numbers a channel, and: input, if the weight needs a gradient or the activation is smooth;
//   else bits

#include "act_table.h"
#include "function.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct BatchNormAct : Function<BatchNormAct> {
  // Returns the output, and with `stats` the mean and the inverse deviation; `used` gets these always.
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const OptTensor& weight,
                               const OptTensor& bias, const OptTensor& running_mean, const OptTensor& running_var,
                               const OptTensor& other, bool training, double momentum, double eps, const Act& act,
                               bool stats, std::array<Tensor, 2>* used) {
    ctx->set_materialize_grads(false);
    const bool want_x = input.requires_grad(), want_w = wants_grad(weight);
    const bool bits = one_bit(act.kind), identity = act.kind == ActKind::identity;
    // What the derivative of the activation is taken from, unless it is 1.
    const bool x_alone = !other && (bits || !identity) && ((training && (want_x || want_w)) || want_w || !bits);
    const bool keep_mask = bits && !x_alone;
    const bool recompute = !identity && !keep_mask;
    const bool keep_x = recompute || want_w || (training && want_x);

    const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
    auto [out, mean, invstd, mask] = norm_forward(input, bn, other, act, keep_mask);
    // Copies of the statistics that eval used: the buffers may change before backward. They are ours already.
    Keeper keeper;
    keeper.add(keep_x ? input : Tensor());
    keeper.add(recompute || want_x ? value_or_undefined(weight) : Tensor());
    keeper.add(recompute ? value_or_undefined(bias) : Tensor());
    keeper.add(mean, /*always_itself=*/true);
    keeper.add(invstd, /*always_itself=*/true);
    keeper.add(recompute ? value_or_undefined(other) : Tensor());
    keeper.add(keep_mask ? mask : Tensor(), /*always_itself=*/true);
    keeper.save(ctx);
    *used = {mean, invstd};
    auto& data = ctx->saved_data;
    data.reserve(16);
    Edges edges;
    std::vector<int64_t> differentiable{edges.of(input), edges.of(weight), edges.of(bias)};
    edges.of(running_mean), edges.of(running_var);
    differentiable.push_back(edges.of(other));
    data["edges"] = std::move(differentiable);
    save_norm(ctx, bn, is_channels_last(input));
    save_act(ctx, act);
    if (!stats) return {out};
    ctx->mark_non_differentiable({mean, invstd});
    return {out, mean, invstd};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(12);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    auto& data = ctx->saved_data;
    const Act act = saved_act(ctx);
    const auto want = wanted<4>(ctx);
    const SavedTensors kept(ctx);
    const bool identity = act.kind == ActKind::identity;
    std::array<bool, 4> compute = want;
    if (identity) compute[3] = false;  // the gradient of `other` is the output's
    // Asked before there is another reference to it. Where the activation's gradient is a result too, its memory is
    // used for that: not where it is the gradient itself, nor where it would be rounded before it has been used.
    const bool rounded = low_precision(grad) && act.kind != ActKind::relu && act.kind != ActKind::hardtanh &&
                         act.kind != ActKind::threshold;
    const bool again = at::GradMode::is_enabled();
    const bool overwrite = !again && only_ours(grad) && !(want[3] && (identity || rounded));
    std::array<Tensor, 4> g;
    if (compute[0] || compute[1] || compute[2] || compute[3]) {
      NormBackward b = saved_norm(ctx, grad);
      b.input = optional(kept[0]), b.weight = optional(kept[1]), b.bias = optional(kept[2]);
      b.mean = kept[3], b.invstd = kept[4];
      b.other = optional(kept[5]), b.mask = optional(kept[6]);
      b.overwrite_grad = overwrite;
      g = again ? differentiable_norm_backward(b, act, compute) : norm_backward(b, act, compute);
    }
    result[0] = g[0];
    result[1] = in_dtype(g[1], data["weight_dtype"]);
    result[2] = in_dtype(g[2], data["bias_dtype"]);
    result[5] = identity && want[3] ? grad : g[3];
    return result;
  }
};

std::tuple<Tensor, Tensor, Tensor> run_batch_norm_act(const Tensor& input, const BatchNormArgs& bn,
                                                      const OptTensor& other, const Act& act, bool stats,
                                                      RecomputeArgument recompute) {
  if (needs_grad(input, value_or_undefined(bn.weight), value_or_undefined(bn.bias), value_or_undefined(other))) {
    std::array<Tensor, 2> used;
    auto out = BatchNormAct::apply(input, bn.weight, bn.bias, bn.running_mean, bn.running_var, other, bn.training,
                                   bn.momentum, bn.eps, act, stats, &used);
    offer(
        out[0],
        {input, value_or_undefined(bn.weight), value_or_undefined(bn.bias), used[0], used[1],
         value_or_undefined(other)},
        [act](std::vector<Tensor>& from, const std::vector<bool>& spare) {
          return norm_apply(from[0], optional(from[1]), optional(from[2]), from[3], from[4], optional(from[5]), act,
                            spare[5]   ? optional(from[5])
                            : spare[0] ? optional(from[0])
                                       : OptTensor());
        },
        recompute, Pieces::no, {}, Rows::all, act.kind == ActKind::relu && !other ? Form::norm_relu : Form::any);
    return stats ? std::make_tuple(out[0], out[1], out[2]) : std::make_tuple(out[0], Tensor(), Tensor());
  }
  auto [out, mean, invstd, mask] = norm_forward(input, bn, other, act, false);
  return {out, mean, invstd};
}

}  // namespace

Tensor batch_norm_act(const Tensor& input, const BatchNormArgs& bn, bool cudnn_enabled, const Act& act,
                      RecomputeArgument recompute) {
  if (!norm_usable(input, bn, {}, act)) return aten_act(aten_norm(input, bn, cudnn_enabled), act);
  return std::get<0>(run_batch_norm_act(input, bn, {}, act, false, recompute));
}

namespace {

Tensor batch_norm_act_op(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                         const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                         double eps, bool cudnn_enabled, c10::string_view name, at::ArrayRef<double> args,
                         int64_t recompute) {
  return batch_norm_act(input, {weight, bias, running_mean, running_var, training, momentum, eps}, cudnn_enabled,
                        parse_act(name, args), recompute);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_stats(const Tensor& input, const OptTensor& weight,
                                                        const OptTensor& bias, const OptTensor& running_mean,
                                                        const OptTensor& running_var, bool training, double momentum,
                                                        double eps, bool cudnn_enabled, c10::string_view name,
                                                        at::ArrayRef<double> args, int64_t recompute) {
  const Act act = parse_act(name, args);
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  if (norm_usable(input, bn, {}, act)) return run_batch_norm_act(input, bn, {}, act, true, recompute);
  const Tensor out = aten_act(aten_norm(input, bn, cudnn_enabled), act);
  at::NoGradGuard no_grad;
  const auto acc = acc_type(input.scalar_type());
  if (!training)
    return {out, running_mean->detach().to(acc, false, true), (running_var->detach().to(acc) + eps).rsqrt()};
  std::vector<int64_t> dims(input.dim() - 1, 0);
  for (int64_t d = 2; d < input.dim(); ++d) dims[d - 1] = d;
  const auto [var, mean] = at::var_mean(input.detach().to(acc), dims, /*correction=*/0, /*keepdim=*/false);
  return {out, mean, (var + eps).rsqrt()};
}

Tensor batch_norm_add_act(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                          const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                          double eps, bool cudnn_enabled, const Tensor& other, c10::string_view name,
                          at::ArrayRef<double> args, int64_t recompute, int64_t in_place) {
  const Act act = parse_act(name, args);
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  const bool casts = makes_new(in_place) && scripted_autocast(input.device().type());
  if (casts || !norm_usable(input, bn, other, act)) {
    const Tensor normed = aten_norm(input, bn, cudnn_enabled);
    if (in_place == kFirst) return aten_act(normed.add_(other), act);
    if (in_place == kSecond) return aten_act(other.clone().add_(normed), act);
    const Tensor a = as_scripted(normed), b = as_scripted(other);
    return aten_act(in_place == kNewFromSecond ? b + a : a + b, act);
  }
  return std::get<0>(run_batch_norm_act(input, bn, other, act, false, recompute));
}

#define TSMEM_BN                                                                                                   \
  "Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, bool training, " \
  "float momentum, float eps, bool cudnn_enabled"

}  // namespace

void register_batch_norm_act(torch::Library& m) {
  m.def("batch_norm_act(" TSMEM_BN ", str act, float[] act_args, int recompute=0) -> Tensor",
        TORCH_FN(batch_norm_act_op));
  m.def("batch_norm_act_stats(" TSMEM_BN ", str act, float[] act_args, int recompute=0) -> (Tensor, Tensor, Tensor)",
        TORCH_FN(batch_norm_act_stats));
  m.def("batch_norm_add_act(" TSMEM_BN
        ", Tensor other, str act, float[] act_args, int recompute=0, int in_place=0) -> Tensor",
        TORCH_FN(batch_norm_add_act));
}

}  // namespace tsmem
