// max_pool2d(act(batch_norm(input))), a network's stem.
//
// Kept for backward: the input, two numbers a channel, and the position of each output in its window (1 byte up to
// windows of 256, 2 up to 65,536, else 4). Neither forward nor backward makes a full-size tensor but the gradient that
// backward returns.

#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Pool {
  std::vector<int64_t> kernel, stride, padding, dilation, out_size;
};

const c10::OperatorHandle& forward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_batch_norm_act_max_pool2d_forward", "");
  return op;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_raw(const Tensor& input, const BatchNormArgs& bn, const Act& act,
                                                       const Pool& pool, bool keep_positions) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = forward_op()
                             .typed<std::tuple<Tensor, Tensor, Tensor, Tensor>(
                                 const Tensor&, const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&,
                                 bool, double, double, int64_t, double, double, double, IntArrayRef, IntArrayRef,
                                 IntArrayRef, IntArrayRef, IntArrayRef, bool)>();
  return op.call(input, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.training, bn.momentum, bn.eps,
                 static_cast<int64_t>(act.kind), act.a, act.b, act.c, pool.kernel, pool.stride, pool.padding,
                 pool.dilation, pool.out_size, keep_positions);
}

Tensor apply_raw(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                 const Tensor& invstd, const Tensor& positions, const Act& act, const Pool& pool) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::_batch_norm_act_max_pool2d_apply", "")
                             .typed<Tensor(const Tensor&, const OptTensor&, const OptTensor&, const Tensor&,
                                           const Tensor&, const Tensor&, int64_t, double, double, double, IntArrayRef,
                                           IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef)>();
  return op.call(input, weight, bias, mean, invstd, positions, static_cast<int64_t>(act.kind), act.a, act.b, act.c,
                 pool.kernel, pool.stride, pool.padding, pool.dilation, pool.out_size);
}

struct NormPool : torch::autograd::Function<NormPool> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                        const BatchNormArgs& bn, const Act& act, const Pool& pool, std::array<Tensor, 3>* used) {
    ctx->set_materialize_grads(false);
    auto [out, mean, invstd, positions] = forward_raw(input, bn, act, pool, true);
    Keeper keeper;
    for (const Tensor& t : {input, value_or_undefined(weight), value_or_undefined(bias)}) keeper.add(t);
    for (const Tensor& t : {mean, invstd, positions}) keeper.add(t, /*always_itself=*/true);
    keeper.save(ctx);
    *used = {mean, invstd, positions};
    Edges edges;
    ctx->saved_data["edges"] = std::vector<int64_t>{edges.of(input), edges.of(weight), edges.of(bias)};
    ctx->saved_data["wants"] = std::vector<int64_t>{input.requires_grad(), wants_grad(weight), wants_grad(bias)};
    ctx->saved_data["state"] = std::vector<int64_t>{
        bn.training, is_channels_last(input), static_cast<int64_t>(act.kind),
        weight ? static_cast<int64_t>(weight->scalar_type()) : 0, bias ? static_cast<int64_t>(bias->scalar_type()) : 0};
    ctx->saved_data["act"] = std::vector<double>{act.a, act.b, act.c};
    ctx->saved_data["kernel"] = pool.kernel;
    ctx->saved_data["stride"] = pool.stride;
    ctx->saved_data["padding"] = pool.padding;
    ctx->saved_data["dilation"] = pool.dilation;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(7);
    if (!grads[0].defined()) return result;
    auto& data = ctx->saved_data;
    const auto edges = data["edges"].toIntVector(), wants = data["wants"].toIntVector(),
               state = data["state"].toIntVector();
    const auto act = data["act"].toDoubleVector();
    std::array<bool, 3> want;
    for (int i = 0; i < 3; ++i) want[i] = wants[i] && edges[i] >= 0 && ctx->needs_input_grad(edges[i]);
    if (!want[0] && !want[1] && !want[2]) return result;
    const Kept kept(ctx);
    std::vector<Tensor> g;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      static const auto op = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("tsmem::_batch_norm_act_max_pool2d_backward", "")
                                 .typed<std::tuple<Tensor, Tensor, Tensor>(
                                     const Tensor&, const Tensor&, const OptTensor&, const OptTensor&, const Tensor&,
                                     const Tensor&, const Tensor&, bool, bool, int64_t, double, double, double,
                                     IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, std::array<bool, 3>)>();
      auto [x, w, b] =
          op.call(grads[0], kept[0], optional(kept[1]), optional(kept[2]), kept[3], kept[4], kept[5], state[0] != 0,
                  state[1] != 0, state[2], act[0], act[1], act[2], data["kernel"].toIntVector(),
                  data["stride"].toIntVector(), data["padding"].toIntVector(), data["dilation"].toIntVector(), want);
      if (w.defined()) w = w.to(static_cast<at::ScalarType>(state[3]));
      if (b.defined()) b = b.to(static_cast<at::ScalarType>(state[4]));
      g = {x, w, b};
    }
    g = kept.refuse_double_backward(std::move(g), "batch_norm_act_max_pool2d", grads[0]);
    std::copy(g.begin(), g.end(), result.begin());
    return result;
  }
};

// Size of one output dimension, as stock computes it; 0 where stock would refuse.
int64_t pooled(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, bool ceil_mode) {
  if (kernel < 1 || stride < 1 || dilation < 1 || padding < 0 || 2 * padding > kernel) return 0;
  const int64_t span = size + 2 * padding - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  if (span < 0) return 0;
  int64_t out = span / stride + 1;
  if (ceil_mode && (out - 1) * stride >= size + padding)
    --out;  // the last window starts inside the input or its left padding
  return out;
}

Tensor batch_norm_act_max_pool2d(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                 const OptTensor& running_mean, const OptTensor& running_var, bool training,
                                 double momentum, double eps, bool cudnn_enabled, c10::string_view name,
                                 at::ArrayRef<double> args, IntArrayRef kernel_size, IntArrayRef stride,
                                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, int64_t recompute) {
  const Act act = parse_act(name, args);
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  const auto two = [](IntArrayRef l) { return l.size() == 1 ? std::vector<int64_t>{l[0], l[0]} : l.vec(); };
  Pool pool{two(kernel_size), two(stride.empty() ? kernel_size : stride), two(padding), two(dilation), {}};
  bool usable = input.dim() == 4 && pool.kernel.size() == 2 && pool.stride.size() == 2 && pool.padding.size() == 2 &&
                pool.dilation.size() == 2 && !input.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
                norm_usable(input, bn, {}, act) && has_kernel(forward_op(), input);
  for (int d = 0; usable && d < 2; ++d) {
    pool.out_size.push_back(
        pooled(input.size(2 + d), pool.kernel[d], pool.stride[d], pool.padding[d], pool.dilation[d], ceil_mode));
    // Of a window with no tap inside the map, in padding and wider apart than the map, there is no position.
    usable = pool.out_size[d] > 0 && (pool.padding[d] == 0 || pool.dilation[d] <= input.size(2 + d));
  }
  // With given statistics and a frozen weight even the norm's input need not be kept: bits and positions do.
  if (usable && !training && one_bit(act.kind) && !wants_grad(weight)) {
    using Norm = Tensor(const Tensor&, const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&, bool,
                        double, double, bool, c10::string_view, at::ArrayRef<double>, int64_t);
    using MaxPool = Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool, int64_t);
    static const auto norm = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::batch_norm_act", "").typed<Norm>();
    static const auto max_pool =
        c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::max_pool2d", "").typed<MaxPool>();
    const Tensor z = norm.call(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled,
                               name, args, /*recompute=*/0);
    return max_pool.call(z, kernel_size, stride, padding, dilation, ceil_mode, /*recompute=*/0);
  }
  if (!usable) {
    const Tensor activated = stock_act(stock_norm(input, bn, cudnn_enabled), act);
    return at::max_pool2d(activated, kernel_size, stride, padding, dilation, ceil_mode);
  }
  if (needs_grad(input, value_or_undefined(weight), value_or_undefined(bias))) {
    std::array<Tensor, 3> used;
    const Tensor out = NormPool::apply(input, weight, bias, bn, act, pool, &used);
    offer(
        out, {input, value_or_undefined(weight), value_or_undefined(bias), used[0], used[1], used[2]},
        [act, pool](std::vector<Tensor>& from, const std::vector<bool>&) {
          return apply_raw(from[0], optional(from[1]), optional(from[2]), from[3], from[4], from[5], act, pool);
        },
        recompute);
    return out;
  }
  return std::get<0>(forward_raw(input, bn, act, pool, false));
}

}  // namespace

void register_batch_norm_act_max_pool2d(torch::Library& m) {
  m.def(
      "batch_norm_act_max_pool2d(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, "
      "bool training, float momentum, float eps, bool cudnn_enabled, str act, float[] act_args, int[2] kernel_size, "
      "int[2] stride, "
      "int[2] padding, int[2] dilation, bool ceil_mode, int recompute=0) -> Tensor",
      TORCH_FN(batch_norm_act_max_pool2d));
}

}  // namespace tsmem
