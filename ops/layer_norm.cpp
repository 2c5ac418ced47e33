// layer_norm and group_norm: keep the input (or what it's made from) and two statistics a row or group; their outputs
// can be recomputed. Forward and backward are aten's native_layer_norm and native_group_norm, under create_graph
// PyTorch's own derivatives.

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

// groups 0: a layer norm over the last dimensions, of `shape`.
struct NormOf {
  std::vector<int64_t> shape;
  int64_t groups = 0;
  double eps = 0;
};

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                      const NormOf& n) {
  if (n.groups == 0) return at::native_layer_norm(x, n.shape, weight, bias, n.eps);
  const Tensor dense = x.contiguous(group_format(x));
  return at::native_group_norm(dense, weight, bias, x.size(0), x.size(1), x.numel() / (x.size(0) * x.size(1)), n.groups,
                               n.eps);
}

struct Norm : Function<Norm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                        const NormOf& n) {
    ctx->set_materialize_grads(false);
    auto [out, mean, invstd] = layer_norm_forward(x, weight, bias, n);
    const bool want_w = weight && weight->requires_grad(), want_x = x.requires_grad();
    Keeper keeper;
    keeper.add(want_x || want_w ? x : Tensor());
    keeper.add(value_or_undefined(weight));
    keeper.add(value_or_undefined(bias));
    keeper.add(mean, /*always_itself=*/true);
    keeper.add(invstd, /*always_itself=*/true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["shape"] = n.shape;
    data["groups"] = n.groups;
    data["eps"] = n.eps;
    data["sizes"] = x.sizes();
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const SavedTensors kept(ctx);
    auto& data = ctx->saved_data;
    const OptTensor weight = optional(kept[1]), bias = optional(kept[2]);
    int64_t edge = 1;
    const int64_t weight_edge = weight ? edge++ : -1, bias_edge = bias ? edge++ : -1;
    const std::array<bool, 3> want{ctx->needs_input_grad(0), weight && ctx->needs_input_grad(weight_edge),
                                   bias && ctx->needs_input_grad(bias_edge)};
    const int64_t groups = data["groups"].toInt();
    if (at::GradMode::is_enabled()) {
      if (!kept[0].defined()) {  // the bias alone
        auto sizes = bias->sizes().vec();
        if (groups != 0) sizes.resize(grads[0].dim() - 1, 1);
        result[2] = grads[0].sum_to_size(sizes).view(bias->sizes());
        return result;
      }
      const auto shape = data["shape"].toIntVector();
      const double eps = data["eps"].toDouble();
      const auto g = differentiable_gradients({kept[0], kept[1], kept[2]}, want, grads[0], [&](const auto& t) {
        const OptTensor b = optional(t[2]), w = weight_beside(optional(t[1]), b);
        return groups == 0 ? at::layer_norm(t[0], shape, w, b, eps) : at::group_norm(t[0], groups, w, b, eps);
      });
      std::copy(g.begin(), g.end(), result.begin());
      return result;
    }
    Tensor x = kept[0];
    if (!x.defined()) x = shape_of(data["sizes"].toIntVector(), grads[0].strides(), grads[0].options());
    std::vector<Tensor> g;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tuple<Tensor, Tensor, Tensor> found;
      if (groups == 0) {
        found = at::native_layer_norm_backward(grads[0].contiguous(), x, data["shape"].toIntVector(), kept[3], kept[4],
                                               weight, bias, want);
      } else {
        const auto format = group_format(x);
        const int64_t n = x.size(0), c = x.size(1);
        found = at::native_group_norm_backward(grads[0].contiguous(format), x.contiguous(format), kept[3], kept[4],
                                               weight, n, c, x.numel() / (n * c), groups, want);
      }
      g = {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
    }
    for (int i = 0; i < 3; ++i)
      if (want[i]) result[i] = g[i];
    return result;
  }
};

bool fits(const Tensor& x, const OptTensor& parameter) {
  return !parameter || (plain(*parameter) && parameter->device() == x.device());
}

Tensor normalize(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const NormOf& n,
                 RecomputeArgument recompute) {
  const Tensor out = Norm::apply(x, weight, bias, n);
  offer(
      out, {x, value_or_undefined(weight), value_or_undefined(bias)},
      [n](std::vector<Tensor>& from, const std::vector<bool>&) {
        return std::get<0>(layer_norm_forward(from[0], optional(from[1]), optional(from[2]), n));
      },
      recompute, Pieces::no, {}, n.groups == 0 && n.shape.size() == 1 ? Rows::own : Rows::all);
  return out;
}

bool layer_norm_is_ours(const Tensor& x, const OptTensor& weight, const OptTensor& bias) {
  return needs_grad(x, value_or_undefined(weight), value_or_undefined(bias)) && plain(x) && x.numel() > 0 &&
         fits(x, weight) && fits(x, bias);
}

OptTensor parameter_as_scripted(const OptTensor& t) { return t ? OptTensor(as_scripted(*t)) : t; }

Tensor run_layer_norm(const Tensor& input, at::IntArrayRef shape, const OptTensor& weight, const OptTensor& bias,
                      double eps, bool cudnn_enable, int64_t recompute) {
  const Tensor x = as_scripted(input, recompute);
  const OptTensor w = parameter_as_scripted(defined(weight)), b = parameter_as_scripted(defined(bias));
  const auto whole = [&](const OptTensor& t) { return !t || t->sizes() == shape; };
  const bool shaped = !x.is_nested() && !shape.empty() && x.dim() >= static_cast<int64_t>(shape.size()) &&
                      x.sizes().slice(x.dim() - shape.size()) == shape && whole(w) && whole(b);
  if (!shaped || !layer_norm_is_ours(x, w, b)) return at::layer_norm(x, shape, w, b, eps, cudnn_enable);
  return normalize(x, w, b, {shape.vec(), 0, eps}, recompute);
}

}  // namespace

Tensor group_norm(const Tensor& input, int64_t groups, const OptTensor& weight, const OptTensor& bias, double eps,
                  bool cudnn_enabled, RecomputeArgument recompute) {
  const Tensor x = as_scripted(input, recompute);
  const OptTensor w = parameter_as_scripted(defined(weight)), b = parameter_as_scripted(defined(bias));
  const auto whole = [&](const OptTensor& t) { return !t || (t->dim() == 1 && t->numel() == x.size(1)); };
  const bool shaped = !x.is_nested() && groups > 0 && x.dim() >= 2 && x.size(1) % groups == 0 && whole(w) && whole(b);
  if (!shaped || !layer_norm_is_ours(x, w, b)) return at::group_norm(x, groups, w, b, eps, cudnn_enabled);
  // native_group_norm reads its parameters as dense ones, which aten::group_norm makes them.
  const auto dense = [](const OptTensor& t) { return t ? OptTensor(t->contiguous()) : t; };
  return normalize(x, dense(w), dense(b), {{}, groups, eps}, recompute);
}

namespace {

Tensor run_group_norm(const Tensor& input, int64_t groups, const OptTensor& weight, const OptTensor& bias, double eps,
                      bool cudnn_enabled, int64_t recompute) {
  return group_norm(input, groups, weight, bias, eps, cudnn_enabled, recompute);
}

// CUDA's autocast runs both in float32, the CPU's leaves them alone, other than TorchScript's (as_scripted).
template <c10::DeviceType device>
Tensor layer_norm_autocast(const Tensor& x, at::IntArrayRef shape, const OptTensor& weight, const OptTensor& bias,
                           double eps, bool cudnn_enable, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return run_layer_norm(cast_for_autocast(at::kFloat, x, device, recompute), shape,
                        cast_for_autocast(at::kFloat, weight, device), cast_for_autocast(at::kFloat, bias, device), eps,
                        cudnn_enable, recompute);
}
template <c10::DeviceType device>
Tensor group_norm_autocast(const Tensor& x, int64_t groups, const OptTensor& weight, const OptTensor& bias, double eps,
                           bool cudnn_enabled, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return run_group_norm(cast_for_autocast(at::kFloat, x, device, recompute), groups,
                        cast_for_autocast(at::kFloat, weight, device), cast_for_autocast(at::kFloat, bias, device), eps,
                        cudnn_enabled, recompute);
}

}  // namespace

void register_layer_norm(torch::Library& m) {
  m.def(
      "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool "
      "cudnn_enable=True, int recompute=0) -> Tensor",
      TORCH_FN(run_layer_norm));
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool "
      "cudnn_enabled=True, int recompute=0) -> Tensor",
      TORCH_FN(run_group_norm));
  m.impl("layer_norm", c10::DispatchKey::AutocastCUDA, TORCH_FN(layer_norm_autocast<c10::DeviceType::CUDA>));
  m.impl("group_norm", c10::DispatchKey::AutocastCUDA, TORCH_FN(group_norm_autocast<c10::DeviceType::CUDA>));
}

}  // namespace tsmem
