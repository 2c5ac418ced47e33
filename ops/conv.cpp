// Convolutions that keep the input only if the weight needs a gradient, and the weight only if the input does.
//
// Forward is PyTorch's op under no grad (same kernels, same errors), backward is at::convolution_backward, which is
// differentiable itself. Of an operand that is not kept, backward needs the shape alone.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include "common.h"
#include "conv_args.h"
#include "conv_slabs.h"
#include "conv_weight_gradient.h"
#include "function.h"
#include "norm_relu_conv.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// PyTorch's op on batched operands.
using Forward = std::function<Tensor(const Tensor& input, const Tensor& weight, const OptTensor& bias)>;

std::vector<int64_t> expand(IntArrayRef list, int64_t dims) {
  return list.size() == 1 ? std::vector<int64_t>(dims, list[0]) : list.vec();
}

// Into how many parts of the batch a large convolution is cut. oneDNN copies its operands and results into layouts of
// its own: of a part at a time, these copies are small, and stay in memory that the allocator need not ask the system
// for.
int64_t parts_of(IntArrayRef input, int64_t out_numel, const Tensor& weight) {
  // Bytes of a part: enough to do for every thread.
  const int64_t least = std::max<int64_t>(8, at::get_num_threads()) << 20;
  const auto numel = c10::multiply_integers(input);
  const int64_t batch = input[0], bytes = (numel + out_numel) * static_cast<int64_t>(weight.element_size());
  if (bytes < 2 * least) return 1;
  const auto per_weight =
      bytes / std::max<int64_t>(1, 2 * weight.numel() * static_cast<int64_t>(weight.element_size()));
  return std::max<int64_t>(1, std::min({bytes / least, per_weight, batch}));
}

// Whether oneDNN copies t: on the CPU, but not channels_last, whose layout it takes as it is. The meta device stands
// for the CPU.
bool copied(const Tensor& t) {
  return (t.is_cpu() || t.is_meta()) && t.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

// f(first, count) for each part of the batch.
template <class F>
void for_parts(int64_t batch, int64_t parts, F f) {
  const int64_t size = (batch + parts - 1) / parts;
  for (int64_t first = 0; first < batch; first += size) f(first, std::min(size, batch - first));
}

// f(x) for each part of the batch of `input`, as one tensor.
template <class F>
Tensor by_parts(const Tensor& input, int64_t parts, F f) {
  Tensor out;
  for_parts(input.size(0), parts, [&](int64_t first, int64_t count) {
    const Tensor part = f(input.narrow(0, first, count));
    if (!out.defined()) {
      auto sizes = part.sizes().vec();
      sizes[0] = input.size(0);
      out = at::empty(sizes, part.options());
    }
    out.narrow(0, first, count).copy_(part);
  });
  return out;
}

// 0 for arguments that PyTorch refuses.
int64_t out_numel(const Tensor& input, const Tensor& weight, const ConvArgs& args) {
  const auto dims = static_cast<size_t>(weight.dim()) - 2;
  for (const auto* list : {&args.stride, &args.padding, &args.dilation, &args.output_padding})
    if (list->size() != dims) return 0;
  for (int64_t s : args.stride)
    if (s <= 0) return 0;
  // A zero after an odd padding makes room for less than one more output a dimension.
  return c10::multiply_integers(conv_output_size(input, weight, args.stride, args.padding, args.dilation,
                                                 args.transposed, args.output_padding, args.groups));
}

// An ordinary convolution, which may be cut into slabs, and for which a device may have kernels that read a norm's
// input.
bool is_plain(const ConvArgs& args) { return !args.transposed && args.groups == 1 && args.pad_after.empty(); }

ConvWindow window_of(const ConvArgs& args) { return {args.stride, args.padding, args.dilation}; }

// The weight's gradient from what the kept input, relu(batch_norm(x)), is made from; undefined where no kernel does
// that.
Tensor weight_gradient_of_norm(const SavedTensors& kept, const Tensor& grad, IntArrayRef input_sizes,
                               IntArrayRef input_strides, IntArrayRef weight_sizes, const ConvWindow& window) {
  if (!may_take_norm_relu_conv(Wanted::weight_gradient, grad, input_sizes, input_strides, weight_sizes, window))
    return {};
  const auto operands = kept.operands_of(0, Form::norm_relu);
  return operands.empty() ? Tensor()
                          : norm_relu_conv_weight_gradient(norm_relu_of(operands), grad, weight_sizes, window);
}

struct Conv : Function<Conv> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight, const OptTensor& bias,
                        const ConvArgs& args, const Forward& aten_forward) {
    ctx->set_materialize_grads(false);
    const bool keep_input = weight.requires_grad(), keep_weight = input.requires_grad();
    Keeper keeper;
    keeper.add(keep_input ? input : Tensor());
    keeper.add(keep_weight ? weight : Tensor());
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["input_sizes"] = input.sizes();
    data["input_strides"] = input.strides();
    data["weight_sizes"] = weight.sizes();
    data["weight_strides"] = weight.strides();
    data["bias_sizes"] = bias ? bias->sizes() : IntArrayRef();
    save_conv(ctx, args);
    data["copied"] = copied(input) && copied(weight);
    return forward_of(input, weight, bias, args, aten_forward);
  }

  static Tensor forward_of(const Tensor& input, const Tensor& weight, const OptTensor& bias, const ConvArgs& args,
                           const Forward& aten_forward) {
    const bool cut = copied(input) && copied(weight) && input.dim() >= 3;
    const int64_t parts = cut ? parts_of(input.sizes(), out_numel(input, weight, args), weight) : 1;
    if (parts <= 1) {
      const int64_t slabs = cut && is_plain(args) ? conv_slabs(input, weight, window_of(args)) : 1;
      return slabs <= 1 ? aten_forward(input, weight, bias)
                        : conv_by_slabs(input, weight, bias, window_of(args), slabs);
    }
    return by_parts(input, parts, [&](const Tensor& x) { return aten_forward(x, weight, bias); });
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(5);
    const SavedTensors kept(ctx);
    auto& data = ctx->saved_data;
    auto ints = [&](const char* name) { return data[name].toIntVector(); };
    const ConvArgs args = saved_conv(ctx);
    const auto bias_sizes = ints("bias_sizes");
    std::vector<int64_t> unpad;
    for (int64_t p : args.pad_after) unpad.push_back(-p);
    const bool has_bias = !bias_sizes.empty();
    const std::array<bool, 3> want{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                   has_bias && ctx->needs_input_grad(2)};
    // Of what is not kept, backward gets the sizes and strides: from them the backend picks its layout, as with the
    // tensor itself.
    const auto kept_weight = kept[1];
    const Tensor weight =
        kept_weight.defined() ? kept_weight : shape_of(ints("weight_sizes"), ints("weight_strides"), grad.options());
    auto sizes = ints("input_sizes");
    const auto strides = ints("input_strides");
    const auto run_part = [&](const Tensor& dy, Tensor input, std::array<bool, 3> mask) {
      if (!input.defined()) {
        sizes[0] = dy.size(0);
        if (mask == std::array<bool, 3>{true, false, false} && args.pad_after.empty())
          if (const Tensor g = conv_input_gradient(dy, weight, sizes, args.stride, args.padding, args.dilation,
                                                   args.transposed, args.groups);
              g.defined())
            return std::vector<Tensor>{g, Tensor(), Tensor()};
        input = shape_of(sizes, strides, grad.options());
      }
      if (!args.pad_after.empty()) input = at::constant_pad_nd(input, args.pad_after);
      auto [g, w, b] = at::convolution_backward(
          dy, input, weight, has_bias ? at::OptionalIntArrayRef(bias_sizes) : at::OptionalIntArrayRef(), args.stride,
          args.padding, args.dilation, args.transposed, args.output_padding, args.groups, mask);
      if (mask[0] && !unpad.empty()) g = at::constant_pad_nd(g, unpad);
      return std::vector<Tensor>{mask[0] ? g : Tensor(), mask[1] ? w : Tensor(), mask[2] ? b : Tensor()};
    };
    // Differentiable as a whole only.
    const bool alone = !at::GradMode::is_enabled();
    const bool cut = alone && data["copied"].toBool() && copied(grad);
    const int64_t parts = cut ? parts_of(sizes, grad.numel(), weight) : 1;
    const bool slabs_fit = cut && parts <= 1 && is_plain(args);
    const auto run = [&](const Tensor& input, std::array<bool, 3> mask) {
      if (slabs_fit) {
        const ConvWindow window = window_of(args);
        const Tensor x = input.defined() ? input : shape_of(sizes, strides, grad.options());
        if (const int64_t slabs = conv_slabs(x, weight, window); slabs > 1) {
          const auto g = conv_backward_by_slabs(
              grad, x, weight, has_bias ? at::OptionalIntArrayRef(bias_sizes) : at::OptionalIntArrayRef(), window, mask,
              slabs);
          return std::vector<Tensor>(g.begin(), g.end());
        }
      }
      if (parts <= 1) return run_part(grad, input, mask);
      std::vector<Tensor> sum(3);
      for_parts(grad.size(0), parts, [&](int64_t first, int64_t count) {
        const auto part =
            run_part(grad.narrow(0, first, count), input.defined() ? input.narrow(0, first, count) : input, mask);
        if (mask[0]) {
          if (!sum[0].defined()) sum[0] = at::empty(ints("input_sizes"), part[0].options());
          sum[0].narrow(0, first, count).copy_(part[0]);
        }
        for (int i : {1, 2})
          if (mask[i]) sum[i] = sum[i].defined() ? sum[i].add_(part[i]) : part[i];
      });
      return sum;
    };
    const auto of_input = [&] { return want[0] ? run(Tensor(), {true, false, false})[0] : Tensor(); };
    std::vector<Tensor> g(3);
    const int64_t together = alone && want[1] ? channels_together(grad, sizes, strides, weight, args) : 0;
    if (together > 0) {
      // The input's gradient first, for which oneDNN copies the weight: beside a small input, not beside the weight's
      // gradient.
      g[0] = of_input();
      std::tie(g[1], g[2]) = weight_gradient_by_parts(grad, kept[0], weight, args, want[2], together);
    } else if (!kept.made(0)) {
      g = run(kept[0], want);
    } else {
      // An input that is recomputed is gone before its gradient is there.
      if (is_plain(args) && want[1] && !want[2])
        g[1] = weight_gradient_of_norm(kept, grad, sizes, strides, ints("weight_sizes"), window_of(args));
      if ((want[1] && !g[1].defined()) || want[2]) g = run(want[1] ? kept[0] : Tensor(), {false, want[1], want[2]});
      g[0] = of_input();
    }
    return {g[0], g[1], g[2], Tensor(), Tensor()};
  }
};

// True where Conv applies; otherwise PyTorch's op runs with its own autograd, or says what is wrong.
bool conv_is_ours(const Tensor& input, const Tensor& weight, const OptTensor& bias) {
  const Tensor no_bias;
  const Tensor& b = bias ? *bias : no_bias;
  return needs_grad(input, weight, b) && plain(input) && plain(weight) && (!b.defined() || plain(b)) &&
         (input.dim() == weight.dim() || input.dim() == weight.dim() - 1);
}

// Batches an unbatched input, as PyTorch does.
Tensor apply_conv(const Tensor& unbatched, const Tensor& weight, const OptTensor& bias, const ConvArgs& args,
                  const Forward& aten_forward, RecomputeArgument recompute) {
  const OptTensor b = defined(bias);
  const bool batched = unbatched.dim() == weight.dim();
  const Tensor input = batched ? unbatched : unbatched.unsqueeze(0);
  const Tensor out = Conv::apply(input, weight, b, args, aten_forward);
  const Tensor& per_weight = args.transposed ? input : out;  // each of its elements meets one filter
  const double flops = 2.0 * static_cast<double>(per_weight.numel()) * static_cast<double>(weight.numel()) /
                       static_cast<double>(std::max<int64_t>(1, weight.size(0)));
  const bool depthwise = args.groups > 1 && args.groups == input.size(1);
  const LayerOffer offered = as_cheap_layer(recompute, out, input, weight, value_or_undefined(b), flops, depthwise);
  MakeWithoutNorm without_norm;
  const auto may_take = [](const Tensor& like, IntArrayRef sizes, IntArrayRef strides, IntArrayRef weight_sizes,
                           const ConvArgs& args) {
    return may_take_norm_relu_conv(Wanted::output, like, sizes, strides, weight_sizes, window_of(args));
  };
  if (is_plain(args) && !b && may_take(input, input.sizes(), input.strides(), weight.sizes(), args))
    without_norm = [args, may_take, like = at::empty({0}, input.options()), sizes = input.sizes().vec(),
                    strides = input.strides().vec(), weight_sizes = weight.sizes().vec()](const auto& operands) {
      const auto from = may_take(like, sizes, strides, weight_sizes, args) ? operands() : std::vector<Tensor>();
      return from.empty() ? Tensor() : norm_relu_conv(norm_relu_of(from), from[kNormReluOperands], window_of(args));
    };
  offer(
      out, {input, weight, value_or_undefined(b)},
      [args](std::vector<Tensor>& from, const std::vector<bool>&) {
        return Conv::forward_of(
            from[0], from[1], optional(from[2]), args,
            [&](const Tensor& x, const Tensor& w, const OptTensor& bias) { return convolve(x, w, bias, args); });
      },
      offered.recompute, Pieces::no, offered.cost, Rows::all, Form::any, std::move(without_norm));
  return batched ? out : out.squeeze(0);
}

template <int64_t D>
Tensor aten_conv(const Tensor& x, const Tensor& w, const OptTensor& b, IntArrayRef stride, IntArrayRef padding,
                 IntArrayRef dilation, int64_t groups) {
  if constexpr (D == 1) return at::conv1d(x, w, b, stride, padding, dilation, groups);
  if constexpr (D == 2) return at::conv2d(x, w, b, stride, padding, dilation, groups);
  if constexpr (D == 3) return at::conv3d(x, w, b, stride, padding, dilation, groups);
}

template <int64_t D>
Tensor aten_conv(const Tensor& x, const Tensor& w, const OptTensor& b, IntArrayRef stride, c10::string_view padding,
                 IntArrayRef dilation, int64_t groups) {
  if constexpr (D == 1) return at::conv1d(x, w, b, stride, padding, dilation, groups);
  if constexpr (D == 2) return at::conv2d(x, w, b, stride, padding, dilation, groups);
  if constexpr (D == 3) return at::conv3d(x, w, b, stride, padding, dilation, groups);
}

template <int64_t D>
Tensor aten_conv_transpose(const Tensor& x, const Tensor& w, const OptTensor& b, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef output_padding, int64_t groups, IntArrayRef dilation) {
  if constexpr (D == 1) return at::conv_transpose1d(x, w, b, stride, padding, output_padding, groups, dilation);
  if constexpr (D == 2) return at::conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation);
  if constexpr (D == 3) return at::conv_transpose3d(x, w, b, stride, padding, output_padding, groups, dilation);
}

template <int64_t D>
Tensor conv(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride, IntArrayRef padding,
            IntArrayRef dilation, int64_t groups, int64_t recompute) {
  if (!conv_is_ours(input, weight, bias) || weight.dim() != D + 2)
    return aten_conv<D>(input, weight, bias, stride, padding, dilation, groups);
  const ConvArgs args{
      expand(stride, D), expand(padding, D), expand(dilation, D), std::vector<int64_t>(D, 0), false, groups};
  return apply_conv(
      input, weight, bias, args,
      [&](const Tensor& x, const Tensor& w, const OptTensor& b) {
        return aten_conv<D>(x, w, b, stride, padding, dilation, groups);
      },
      recompute);
}

// With padding="same" or "valid".
template <int64_t D>
Tensor conv_of_named_padding(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                             c10::string_view padding, IntArrayRef dilation, int64_t groups, int64_t recompute,
                             const Forward& aten) {
  const bool same = padding == "same";
  if (!conv_is_ours(input, weight, bias) || weight.dim() != D + 2 || (!same && padding != "valid"))
    return aten(input, weight, bias);
  ConvArgs args{
      expand(stride, D), std::vector<int64_t>(D, 0), expand(dilation, D), std::vector<int64_t>(D, 0), false, groups};
  if (same && args.dilation.size() == D) {
    // The odd one of an odd total goes after the input, by a padding of its own.
    std::vector<int64_t> after(2 * D, 0);
    for (int64_t d = 0; d < D; ++d) {
      const int64_t total = args.dilation[d] * (weight.size(d + 2) - 1);
      args.padding[d] = total / 2;
      after[2 * (D - 1 - d) + 1] = total % 2;
    }
    if (std::any_of(after.begin(), after.end(), [](int64_t p) { return p != 0; })) args.pad_after = after;
  }
  return apply_conv(input, weight, bias, args, aten, recompute);
}

template <int64_t D>
Tensor conv_padding(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                    c10::string_view padding, IntArrayRef dilation, int64_t groups, int64_t recompute) {
  return conv_of_named_padding<D>(input, weight, bias, stride, padding, dilation, groups, recompute,
                                  [&](const Tensor& x, const Tensor& w, const OptTensor& b) {
                                    return aten_conv<D>(x, w, b, stride, padding, dilation, groups);
                                  });
}

// As traced models have them.
Tensor convolution_mode(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                        c10::string_view padding, IntArrayRef dilation, int64_t groups, int64_t recompute) {
  const Forward aten = [&](const Tensor& x, const Tensor& w, const OptTensor& b) {
    return at::_convolution_mode(x, w, b, stride, padding, dilation, groups);
  };
  if (input.dim() != weight.dim()) return aten(input, weight, bias);
  switch (weight.dim()) {
    case 3:
      return conv_of_named_padding<1>(input, weight, bias, stride, padding, dilation, groups, recompute, aten);
    case 4:
      return conv_of_named_padding<2>(input, weight, bias, stride, padding, dilation, groups, recompute, aten);
    case 5:
      return conv_of_named_padding<3>(input, weight, bias, stride, padding, dilation, groups, recompute, aten);
    default:
      return aten(input, weight, bias);
  }
}

template <int64_t D>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                      IntArrayRef padding, IntArrayRef output_padding, int64_t groups, IntArrayRef dilation,
                      int64_t recompute) {
  if (!conv_is_ours(input, weight, bias) || weight.dim() != D + 2)
    return aten_conv_transpose<D>(input, weight, bias, stride, padding, output_padding, groups, dilation);
  const ConvArgs args{
      expand(stride, D), expand(padding, D), expand(dilation, D), expand(output_padding, D), true, groups};
  return apply_conv(
      input, weight, bias, args,
      [&](const Tensor& x, const Tensor& w, const OptTensor& b) {
        return aten_conv_transpose<D>(x, w, b, stride, padding, output_padding, groups, dilation);
      },
      recompute);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups, bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32,
                   int64_t recompute) {
  const Forward aten_forward = [&](const Tensor& x, const Tensor& w, const OptTensor& b) {
    return at::_convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups, benchmark,
                            deterministic, cudnn_enabled, allow_tf32);
  };
  if (!conv_is_ours(input, weight, bias) || input.dim() != weight.dim()) return aten_forward(input, weight, bias);
  const int64_t d = weight.dim() - 2;
  return apply_conv(
      input, weight, bias,
      {expand(stride, d), expand(padding, d), expand(dilation, d), expand(output_padding, d), transposed, groups},
      aten_forward, recompute);
}

Tensor convolution_deprecated(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                              IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                              int64_t groups, bool benchmark, bool deterministic, bool cudnn_enabled,
                              int64_t recompute) {
  return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, benchmark,
                     deterministic, cudnn_enabled, at::globalContext().allowTF32CuDNN(at::Float32Op::CONV), recompute);
}

// `op` with its operands cast as autocast casts a convolution's; weights through the cache that all ops share.
template <auto op, c10::DeviceType device>
struct Lower;
template <class... Rest, Tensor (*op)(const Tensor&, const Tensor&, const OptTensor&, Rest...), c10::DeviceType device>
struct Lower<op, device> {
  static Tensor call(const Tensor& input, const Tensor& weight, const OptTensor& bias, Rest... rest) {
    c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto to = at::autocast::get_lower_precision_fp_from_device_type(device);
    const int64_t recompute = std::get<sizeof...(Rest) - 1>(std::tie(rest...));
    return op(cast_for_autocast(to, input, device, recompute), cast_for_autocast(to, weight, device),
              at::autocast::cached_cast(to, bias, device), rest...);
  }
};

// The CPU's autocast leaves aten::_convolution alone, which traced models have; TorchScript's pass does not.
template <c10::DeviceType device>
Tensor traced_convolution(const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
                          IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                          int64_t groups, bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32,
                          int64_t recompute) {
  const bool lower = device != c10::DeviceType::CPU || !torch::jit::currentCallstack().empty();
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto op = lower ? &Lower<&convolution, device>::call : &convolution;
  return op(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, benchmark,
            deterministic, cudnn_enabled, allow_tf32, recompute);
}

template <c10::DeviceType device>
void register_for_autocast(torch::Library& m) {
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  m.impl("conv1d", key, TORCH_FN((Lower<&conv<1>, device>::call)));
  m.impl("conv2d", key, TORCH_FN((Lower<&conv<2>, device>::call)));
  m.impl("conv3d", key, TORCH_FN((Lower<&conv<3>, device>::call)));
  m.impl("conv1d.padding", key, TORCH_FN((Lower<&conv_padding<1>, device>::call)));
  m.impl("conv2d.padding", key, TORCH_FN((Lower<&conv_padding<2>, device>::call)));
  m.impl("conv3d.padding", key, TORCH_FN((Lower<&conv_padding<3>, device>::call)));
  m.impl("conv_transpose1d", key, TORCH_FN((Lower<&conv_transpose<1>, device>::call)));
  m.impl("conv_transpose2d.input", key, TORCH_FN((Lower<&conv_transpose<2>, device>::call)));
  m.impl("conv_transpose3d.input", key, TORCH_FN((Lower<&conv_transpose<3>, device>::call)));
  m.impl("_convolution.deprecated", key, TORCH_FN((Lower<&convolution_deprecated, device>::call)));
  m.impl("_convolution", key, TORCH_FN((traced_convolution<device>)));
  // The CPU's autocast leaves it alone, TorchScript's pass too.
  if constexpr (device != c10::DeviceType::CPU)
    m.impl("_convolution_mode", key, TORCH_FN((Lower<&convolution_mode, device>::call)));
}

}  // namespace

void register_conv(torch::Library& m) {
  m.def(
      "conv1d(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, int[1] dilation=1, "
      "int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv<1>));
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, int[2] dilation=1, "
      "int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv<2>));
  m.def(
      "conv3d(Tensor input, Tensor weight, Tensor? bias=None, int[3] stride=1, int[3] padding=0, int[3] dilation=1, "
      "int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv<3>));
  m.def(
      "conv1d.padding(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, str padding=\"valid\", int[1] "
      "dilation=1, int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_padding<1>));
  m.def(
      "conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, str padding=\"valid\", int[2] "
      "dilation=1, int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_padding<2>));
  m.def(
      "conv3d.padding(Tensor input, Tensor weight, Tensor? bias=None, int[3] stride=1, str padding=\"valid\", int[3] "
      "dilation=1, int groups=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_padding<3>));
  m.def(
      "conv_transpose1d(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, int[1] "
      "output_padding=0, int groups=1, int[1] dilation=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_transpose<1>));
  m.def(
      "conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] output_padding=0, int groups=1, int[2] dilation=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_transpose<2>));
  m.def(
      "conv_transpose3d.input(Tensor input, Tensor weight, Tensor? bias=None, int[3] stride=1, int[3] padding=0, "
      "int[3] output_padding=0, int groups=1, int[3] dilation=1, int recompute=0) -> Tensor",
      TORCH_FN(conv_transpose<3>));
  m.def(
      "_convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool "
      "transposed, int[] output_padding, int groups, bool benchmark, bool deterministic, bool cudnn_enabled, bool "
      "allow_tf32, int recompute=0) -> Tensor",
      TORCH_FN(convolution));
  m.def(
      "_convolution.deprecated(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups, bool benchmark, bool deterministic, bool cudnn_enabled, int "
      "recompute=0) -> Tensor",
      TORCH_FN(convolution_deprecated));
  m.def(
      "_convolution_mode(Tensor input, Tensor weight, Tensor? bias, int[] stride, str padding, int[] dilation, int "
      "groups, int recompute=0) -> Tensor",
      TORCH_FN(convolution_mode));
  register_for_autocast<c10::DeviceType::CPU>(m);
  register_for_autocast<c10::DeviceType::CUDA>(m);
}

}  // namespace tsmem
