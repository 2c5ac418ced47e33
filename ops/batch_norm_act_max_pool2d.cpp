// max_pool2d(act(batch_norm(input))), a network's stem.
//
// Kept for backward: the input, two numbers a channel, and the position of each output in its window (as max_pool.cpp
// keeps it). Neither forward nor backward makes a full-size tensor but the gradient that backward returns.

#include "act_table.h"
#include "function.h"
#include "norm_ops.h"
#include "raw_op.h"
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
  bool ceil_mode = false;
};

// Positions in their windows, as the kernels have them, from those that are kept.
struct Positions {
  int bits = 8;
  std::vector<int64_t> sizes = {}, strides = {};

  Tensor again(const Tensor& kept) const { return unpack(kept, bits, sizes, strides, at::kByte); }
};

using NormPoolOp = RawOp<std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor& input, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
    const OptTensor& running_var, bool training, double momentum, double eps, const Act& act, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, IntArrayRef out_size, bool keep_positions)>;
using NormPoolApplyOp =
    RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                 const Tensor& invstd, const Tensor& positions, const Act& act, IntArrayRef kernel, IntArrayRef stride,
                 IntArrayRef padding, IntArrayRef dilation, IntArrayRef out_size)>;
using NormPoolBackwardOp = RawOp<std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& grad, const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
    const Tensor& invstd, const Tensor& positions, bool training, bool channels_last, const Act& act,
    IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, std::array<bool, 3> want)>;

const NormPoolOp& norm_pool_op() {
  static const NormPoolOp op("tsmem::_batch_norm_act_max_pool2d_forward");
  return op;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_raw(const Tensor& input, const BatchNormArgs& bn, const Act& act,
                                                       const Pool& pool, bool keep_positions) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return norm_pool_op()(input, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.training, bn.momentum, bn.eps,
                        act, pool.kernel, pool.stride, pool.padding, pool.dilation, pool.out_size, keep_positions);
}

Tensor apply_raw(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                 const Tensor& invstd, const Tensor& positions, const Act& act, const Pool& pool) {
  static const NormPoolApplyOp op("tsmem::_batch_norm_act_max_pool2d_apply");
  return op(input, weight, bias, mean, invstd, positions, act, pool.kernel, pool.stride, pool.padding, pool.dilation,
            pool.out_size);
}

struct NormPool : Function<NormPool> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                        const BatchNormArgs& bn, const Act& act, const Pool& pool, std::array<Tensor, 3>* used,
                        Positions* layout) {
    ctx->set_materialize_grads(false);
    auto [out, mean, invstd, taken] = forward_raw(input, bn, act, pool, true);
    *layout = {position_bits(pool.kernel[0] * pool.kernel[1], input), taken.sizes().vec(), taken.strides().vec()};
    const Tensor positions = pack(taken, layout->bits);
    Keeper keeper;
    for (const Tensor& t : {input, value_or_undefined(weight), value_or_undefined(bias)}) keeper.add(t);
    for (const Tensor& t : {mean, invstd, positions}) keeper.add(t, /*always_itself=*/true);
    keeper.save(ctx);
    *used = {mean, invstd, positions};
    Edges edges;
    auto& data = ctx->saved_data;
    data.reserve(32);
    data["position_bits"] = layout->bits;
    data["position_strides"] = layout->strides;
    data["edges"] = std::vector<int64_t>{edges.of(input), edges.of(weight), edges.of(bias)};
    save_norm(ctx, bn, is_channels_last(input));
    data["kernel"] = pool.kernel;
    data["stride"] = pool.stride;
    data["padding"] = pool.padding;
    data["dilation"] = pool.dilation;
    data["ceil_mode"] = pool.ceil_mode;
    save_act(ctx, act);
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(8);
    if (!grads[0].defined()) return result;
    auto& data = ctx->saved_data;
    const auto want = wanted<3>(ctx);
    if (!want[0] && !want[1] && !want[2]) return result;
    const SavedTensors kept(ctx);
    const auto kernel = data["kernel"].toIntVector(), stride = data["stride"].toIntVector(),
               padding = data["padding"].toIntVector(), dilation = data["dilation"].toIntVector();
    std::vector<Tensor> g;
    if (at::GradMode::is_enabled()) {
      const Act act = saved_act(ctx);
      g = differentiable_gradients({kept[0], kept[1], kept[2]}, want, grads[0], [&](const auto& t) {
        const Tensor activated = norm_by_pytorch(t[0], optional(t[1]), optional(t[2]), kept[3], kept[4],
                                                 data["training"].toBool(), data["eps"].toDouble(), {}, act);
        return at::max_pool2d(activated, kernel, stride, padding, dilation, data["ceil_mode"].toBool());
      });
    } else {
      at::AutoDispatchBelowADInplaceOrView guard;
      static const NormPoolBackwardOp op("tsmem::_batch_norm_act_max_pool2d_backward");
      const Positions layout{static_cast<int>(data["position_bits"].toInt()), grads[0].sizes().vec(),
                             data["position_strides"].toIntVector()};
      const auto [x, w, b] = op(grads[0], kept[0], optional(kept[1]), optional(kept[2]), kept[3], kept[4],
                                layout.again(kept[5]), data["training"].toBool(), data["channels_last"].toBool(),
                                saved_act(ctx), kernel, stride, padding, dilation, want);
      g = {x, in_dtype(w, data["weight_dtype"]), in_dtype(b, data["bias_dtype"])};
    }
    std::copy(g.begin(), g.end(), result.begin());
    return result;
  }
};

// Size of one output dimension, as PyTorch computes it; 0 where PyTorch would refuse.
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
  Pool pool{two(kernel_size), two(stride.empty() ? kernel_size : stride), two(padding), two(dilation), {}, ceil_mode};
  bool usable = input.dim() == 4 && pool.kernel.size() == 2 && pool.stride.size() == 2 && pool.padding.size() == 2 &&
                pool.dilation.size() == 2 && !input.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
                norm_usable(input, bn, {}, act);
  const bool fused = has_kernel(norm_pool_op().handle(), input);
  for (int d = 0; usable && d < 2; ++d) {
    pool.out_size.push_back(
        pooled(input.size(2 + d), pool.kernel[d], pool.stride[d], pool.padding[d], pool.dilation[d], ceil_mode));
    // Of a window with no tap inside the map, in padding and wider apart than the map, there is no position.
    usable = pool.out_size[d] > 0 && (pool.padding[d] == 0 || pool.dilation[d] <= input.size(2 + d));
  }
  // With given statistics and a frozen weight even the norm's input need not be kept: bits and positions do.
  const bool bits = !training && one_bit(act.kind) && !wants_grad(weight);
  if (usable && (bits || !fused)) {
    using Norm = Tensor(const Tensor&, const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&, bool,
                        double, double, bool, c10::string_view, at::ArrayRef<double>, int64_t);
    using MaxPool = Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool, int64_t);
    static const auto norm = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::batch_norm_act", "").typed<Norm>();
    static const auto max_pool =
        c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::max_pool2d", "").typed<MaxPool>();
    const RecomputeArgument how = bits ? Recompute::off : RecomputeArgument(recompute);
    const Tensor z = norm.call(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled,
                               name, args, argument_of(how.how));
    return max_pool.call(z, kernel_size, stride, padding, dilation, ceil_mode, how.argument());
  }
  if (!usable) {
    const Tensor activated = aten_act(aten_norm(input, bn, cudnn_enabled), act);
    return at::max_pool2d(activated, kernel_size, stride, padding, dilation, ceil_mode);
  }
  if (needs_grad(input, value_or_undefined(weight), value_or_undefined(bias))) {
    std::array<Tensor, 3> used;
    Positions positions;
    const Tensor out = NormPool::apply(input, weight, bias, bn, act, pool, &used, &positions);
    offer(
        out, {input, value_or_undefined(weight), value_or_undefined(bias), used[0], used[1], used[2]},
        [act, pool, positions](std::vector<Tensor>& from, const std::vector<bool>&) {
          return apply_raw(from[0], optional(from[1]), optional(from[2]), from[3], from[4], positions.again(from[5]),
                           act, pool);
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
