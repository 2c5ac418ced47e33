// act(batch_norm(convolution(input))) as one op.
//
// Kept for backward: the convolution's input only if its weight needs a gradient or the output is recomputed; its
// weight only if its input does; and of the normalisation what batch_norm_act keeps, where with `recompute` the
// convolution's output is not kept but computed again.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "act_table.h"
#include "conv_args.h"
#include "function.h"
#include "norm_ops.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ConvNorm : Function<ConvNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& conv_weight,
                        const OptTensor& conv_bias, const OptTensor& weight, const OptTensor& bias,
                        const ConvArgs& conv, const BatchNormArgs& bn, const Act& act, bool recompute_y) {
    ctx->set_materialize_grads(false);
    const bool want_conv = input.requires_grad() || conv_weight.requires_grad() || wants_grad(conv_bias);
    const bool want_w = wants_grad(weight), bits = one_bit(act.kind), identity = act.kind == ActKind::identity;
    // As in batch_norm_act.cpp.
    const bool from_y = !identity && ((bn.training && (want_conv || want_w)) || want_w || !bits);
    const bool keep_mask = bits && !from_y;
    const bool needs_y = from_y || want_w || (bn.training && want_conv), again = needs_y && recompute_y;

    const Tensor y = convolve(input, conv_weight, conv_bias, conv);
    auto [out, mean, invstd, mask] = norm_forward(y, bn, {}, act, keep_mask);
    const bool keep_input = again || conv_weight.requires_grad(),
               keep_weight = again || input.requires_grad() || conv_weight.is_leaf();
    ctx->save_for_backward({keep_input ? input : Tensor(), keep_weight ? conv_weight : Tensor(),
                            needs_y ? value_or_undefined(conv_bias) : Tensor(), needs_y && !again ? y : Tensor(),
                            from_y || want_conv ? value_or_undefined(weight) : Tensor(),
                            from_y ? value_or_undefined(bias) : Tensor(), mean, invstd, keep_mask ? mask : Tensor()});
    auto& data = ctx->saved_data;
    data.reserve(24);
    Edges edges;
    data["edges"] = std::vector<int64_t>{edges.of(input), edges.of(conv_weight), edges.of(conv_bias), edges.of(weight),
                                         edges.of(bias)};
    save_conv(ctx, conv);
    data["recompute_y"] = again;
    data["conv_requires_grad"] = want_conv;
    save_norm(ctx, bn, is_channels_last(y));
    data["input_format"] = static_cast<int64_t>(input.suggest_memory_format());
    data["conv_weight_format"] = static_cast<int64_t>(conv_weight.suggest_memory_format());
    save_act(ctx, act);
    data["input_sizes"] = input.sizes();
    data["conv_weight_sizes"] = conv_weight.sizes();
    data["conv_bias_sizes"] = conv_bias ? conv_bias->sizes() : IntArrayRef();
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(9);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    auto& data = ctx->saved_data;
    const auto want = wanted<5>(ctx);
    if (std::none_of(want.begin(), want.end(), [](bool w) { return w; })) return result;
    const ConvArgs conv = saved_conv(ctx);
    const Act act = saved_act(ctx);
    const auto saved = ctx->get_saved_variables();
    NormBackward b = saved_norm(ctx, grad);
    b.input = optional(saved[3]), b.weight = optional(saved[4]), b.bias = optional(saved[5]);
    b.mean = saved[6], b.invstd = saved[7];
    b.mask = optional(saved[8]);
    if (at::GradMode::is_enabled() && !data["conv_requires_grad"].toBool() && !data["recompute_y"].toBool()) {
      const auto g = differentiable_norm_backward(b, act, {false, want[3], want[4], false});
      result[3] = g[1], result[4] = g[2];
      return result;
    }
    // Where all that the output depends on is kept, by operators that can be differentiated again.
    if (at::GradMode::is_enabled() && saved[0].defined() && saved[1].defined()) {
      const Tensor before = b.mask ? gradient_before_masked(b, act) : grad;
      const Act rest = b.mask ? Act{ActKind::identity} : act;
      const auto bias_sizes = data["conv_bias_sizes"].toIntVector();
      const Tensor conv_bias =
          saved[2].defined() || bias_sizes.empty() ? saved[2] : at::zeros(bias_sizes, saved[1].options());
      const std::vector<Tensor> operands{saved[0], saved[1], conv_bias,
                                         kept_or_any(b.weight, want[3], b.mean, b.weight_dtype),
                                         kept_or_any(b.bias, want[4], b.mean, b.bias_dtype)};
      const auto g = differentiable_gradients(operands, want, before, [&](const auto& t) {
        return norm_by_pytorch(convolve(t[0], t[1], optional(t[2]), conv), optional(t[3]), optional(t[4]), b.mean,
                               b.invstd, b.training, b.eps, {}, rest);
      });
      std::copy(g.begin(), g.end(), result.begin());
      return result;
    }
    std::vector<Tensor> g(5);
    {
      at::NoGradGuard no_grad;
      if (data["recompute_y"].toBool()) b.input = convolve(saved[0], saved[1], optional(saved[2]), conv);
      const bool through = want[0] || want[1] || want[2];
      auto norm = norm_backward(b, act, {through, want[3], want[4], false});
      g[3] = in_dtype(norm[1], data["weight_dtype"]);
      g[4] = in_dtype(norm[2], data["bias_dtype"]);
      if (through) {
        // Of an operand that is not kept, the backward functions read the shape alone.
        const auto shape = [&](const Tensor& kept, const char* sizes, const char* format) {
          if (kept.defined()) return kept;
          return shape_in(data[sizes].toIntVector(), static_cast<at::MemoryFormat>(data[format].toInt()),
                          grad.options());
        };
        const Tensor weight = shape(saved[1], "conv_weight_sizes", "conv_weight_format");
        if (want[0] && !want[1] && !want[2] && !saved[0].defined())
          g[0] = conv_input_gradient(norm[0], weight, data["input_sizes"].toIntVector(), conv.stride, conv.padding,
                                     conv.dilation, conv.transposed, conv.groups);
        if (!g[0].defined()) {
          const auto bias_sizes = data["conv_bias_sizes"].toIntVector();
          std::tie(g[0], g[1], g[2]) = at::convolution_backward(
              norm[0], shape(saved[0], "input_sizes", "input_format"), weight,
              bias_sizes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(bias_sizes), conv.stride,
              conv.padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups,
              {want[0], want[1], want[2]});
        }
      }
    }
    variable_list sources{grad};
    sources.insert(sources.end(), saved.begin(), saved.end());
    g = refuse_double_backward(std::move(g), "conv_batch_norm_act", sources);
    std::copy(g.begin(), g.end(), result.begin());
    return result;
  }
};

// Autocast's policy for convolutions: to its lower precision. (Cast here, not by an autocast kernel, as what follows
// the convolution has PyTorch's own policies.)
Tensor for_autocast(const Tensor& t) {
  if (!t.defined()) return t;
  const auto device = t.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device) ||
      c10::impl::tls_is_dispatch_key_excluded(at::autocast::get_autocast_dispatch_key_from_device_type(device)))
    return t;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}

Tensor conv_batch_norm_act(const Tensor& input_, const Tensor& conv_weight_, const OptTensor& conv_bias_,
                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                           IntArrayRef output_padding, int64_t groups, const OptTensor& weight, const OptTensor& bias,
                           const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                           double eps, bool cudnn_enabled, c10::string_view name, at::ArrayRef<double> args,
                           bool recompute) {
  const Act act = parse_act(name, args);
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  const Tensor input = for_autocast(input_), conv_weight = for_autocast(conv_weight_);
  const OptTensor conv_bias = optional(for_autocast(value_or_undefined(conv_bias_)));
  const ConvArgs conv{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups};
  const bool grad = needs_grad(input, conv_weight, value_or_undefined(conv_bias), value_or_undefined(weight),
                               value_or_undefined(bias));
  const auto fits = [&](const Tensor& t) {
    return plain(t) && t.scalar_type() == input.scalar_type() && t.device() == input.device();
  };
  const bool fused =
      grad && input.dim() >= 3 && input.dim() == conv_weight.dim() && input.sym_numel() != 0 && fits(conv_weight) &&
      (!conv_bias || fits(*conv_bias)) && !input.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
      norm_usable(input, transposed ? conv_weight.sym_size(1) * groups : conv_weight.sym_size(0), bn, act);
  if (fused) return ConvNorm::apply(input, conv_weight, conv_bias, weight, bias, conv, bn, act, recompute);
  const Tensor y = convolve(input, conv_weight, conv_bias, conv);
  if (grad || !norm_usable(y, bn, {}, act)) return aten_act(aten_norm(y, bn, cudnn_enabled), act);
  return std::get<0>(norm_forward(y, bn, {}, act, false));
}

}  // namespace

void register_conv_batch_norm_act(torch::Library& m) {
  m.def(
      "conv_batch_norm_act(Tensor input, Tensor conv_weight, Tensor? conv_bias, int[] stride, int[] padding, int[] "
      "dilation, "
      "bool transposed, int[] output_padding, int groups, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, bool training, float momentum, float eps, bool cudnn_enabled, str act, float[] "
      "act_args, "
      "bool recompute_conv) -> Tensor",
      TORCH_FN(conv_batch_norm_act));
}

}  // namespace tsmem
