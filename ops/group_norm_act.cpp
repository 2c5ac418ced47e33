// act(group_norm(input)): keeps the input (or what it's made from) and two statistics a group of each image; the norm's
// own result is never there as a whole, neither in forward nor in backward. Under create_graph backward is PyTorch's
// own of the two operators, which has second derivatives.

#include <ATen/autocast_mode.h>

#include "function.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GroupNormAct : Function<GroupNormAct> {
  // `used` gets the statistics.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                        int64_t groups, double eps, const Act& act, std::array<Tensor, 2>* used) {
    ctx->set_materialize_grads(false);
    auto [out, mean, invstd] = group_norm_forward(input, weight, bias, groups, eps, act);
    Keeper keeper;
    keeper.add(input);
    keeper.add(value_or_undefined(weight));
    keeper.add(value_or_undefined(bias));
    keeper.add(mean, /*always_itself=*/true);
    keeper.add(invstd, /*always_itself=*/true);
    keeper.save(ctx);
    *used = {mean, invstd};
    Edges edges;
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["edges"] = std::vector<int64_t>{edges.of(input), edges.of(weight), edges.of(bias)};
    ctx->saved_data["weight_dtype"] = dtype_of(weight);
    ctx->saved_data["bias_dtype"] = dtype_of(bias);
    save_act(ctx, act);
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(7);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const auto want = wanted<3>(ctx);
    const SavedTensors kept(ctx);
    if (at::GradMode::is_enabled()) {
      const int64_t groups = ctx->saved_data["groups"].toInt();
      const double eps = ctx->saved_data["eps"].toDouble();
      const Act act = saved_act(ctx);
      const auto g = differentiable_gradients({kept[0], kept[1], kept[2]}, want, grad, [&](const auto& t) {
        const OptTensor b = optional(t[2]);
        return aten_act(at::group_norm(t[0], groups, weight_beside(optional(t[1]), b), b, eps), act);
      });
      std::copy(g.begin(), g.end(), result.begin());
      return result;
    }
    auto g = group_norm_backward(grad, kept[0], optional(kept[1]), optional(kept[2]), kept[3], kept[4], saved_act(ctx),
                                 want, only_ours(grad));
    g[1] = in_dtype(g[1], ctx->saved_data["weight_dtype"]);
    g[2] = in_dtype(g[2], ctx->saved_data["bias_dtype"]);
    std::copy(g.begin(), g.end(), result.begin());
    return result;
  }
};

// Planes of fewer elements take longer by our kernels, whose coefficients are numbers a plane, than by two operators.
constexpr int64_t kLeastPlane = 32;

// input: [N, C, *], weight, bias: [C].
Tensor group_norm_act(const Tensor& input, int64_t groups, const OptTensor& weight_, const OptTensor& bias_, double eps,
                      bool cudnn_enabled, c10::string_view name, at::ArrayRef<double> args,
                      RecomputeArgument recompute) {
  const Act act = parse_act(name, args);
  const Tensor x = as_scripted(input, recompute);
  const auto of = [](const OptTensor& t) { return t && t->defined() ? OptTensor(as_scripted(*t)) : OptTensor(); };
  const OptTensor weight = of(weight_), bias = of(bias_);
  const auto by_pytorch = [&] { return aten_act(at::group_norm(x, groups, weight, bias, eps, cudnn_enabled), act); };
  if (!plain(x) || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || x.dim() < 2 || groups <= 0 ||
      x.numel() == 0 || x.size(1) % groups != 0)
    return by_pytorch();
  // Without a variance eps 0 gives PyTorch's infinities.
  if (!norm_usable(x, {weight, bias, {}, {}, true, 0, eps}, {}, act) || !(eps > 0)) return by_pytorch();
  if (x.numel() / (x.size(0) * x.size(1)) < kLeastPlane) {
    const Tensor normed = group_norm(x, groups, weight, bias, eps, cudnn_enabled, recompute);
    return act.kind == ActKind::identity ? normed : tsmem::act(normed, name, args, recompute.argument(), false);
  }
  if (!needs_grad(x, value_or_undefined(weight), value_or_undefined(bias)))
    return std::get<0>(group_norm_forward(x, weight, bias, groups, eps, act));
  std::array<Tensor, 2> used;
  const Tensor out = GroupNormAct::apply(x, weight, bias, groups, eps, act, &used);
  offer(
      out, {x, value_or_undefined(weight), value_or_undefined(bias), used[0], used[1]},
      [act](std::vector<Tensor>& from, const std::vector<bool>& spare) {
        return group_norm_apply(from[0], optional(from[1]), optional(from[2]), from[3], from[4], act,
                                spare[0] ? optional(from[0]) : OptTensor());
      },
      recompute);
  return out;
}

Tensor group_norm_act_op(const Tensor& input, int64_t groups, const OptTensor& weight, const OptTensor& bias,
                         double eps, bool cudnn_enabled, c10::string_view name, at::ArrayRef<double> args,
                         int64_t recompute) {
  return group_norm_act(input, groups, weight, bias, eps, cudnn_enabled, name, args, recompute);
}

// CUDA's autocast runs group norms in float32, the CPU's leaves them alone.
Tensor group_norm_act_autocast(const Tensor& input, int64_t groups, const OptTensor& weight, const OptTensor& bias,
                               double eps, bool cudnn_enabled, c10::string_view name, at::ArrayRef<double> args,
                               int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  const auto cast = [](const auto& t, int64_t again = 0) { return cast_for_autocast(at::kFloat, t, at::kCUDA, again); };
  return group_norm_act(cast(input, recompute), groups, cast(weight), cast(bias), eps, cudnn_enabled, name, args,
                        recompute);
}

}  // namespace

void register_group_norm_act(torch::Library& m) {
  m.def(
      "group_norm_act(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, bool cudnn_enabled, str "
      "act, float[] act_args, int recompute=0) -> Tensor",
      TORCH_FN(group_norm_act_op));
  m.impl("group_norm_act", c10::DispatchKey::AutocastCUDA, TORCH_FN(group_norm_act_autocast));
}

}  // namespace tsmem
