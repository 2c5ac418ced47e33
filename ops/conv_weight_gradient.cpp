#include "conv_weight_gradient.h"

#include <ATen/Parallel.h>
#include <ATen/native/ConvUtils.h>

#include <algorithm>

#include "common.h"

namespace tsmem {

using at::IntArrayRef;
using at::Tensor;

namespace {

// oneDNN's layouts have this many channels together.
constexpr int64_t kBlock = 16;

// Of an input and a weight of these shapes.
bool by_onednn(IntArrayRef input_sizes, IntArrayRef input_strides, const Tensor& weight, const ConvArgs& args) {
  using at::native::ConvBackend;
  const auto options = at::TensorOptions(weight.scalar_type());  // the meta device stands for the CPU
  const ConvBackend backend = at::native::select_conv_backend(
      shape_of(input_sizes, input_strides, options), shape_of(weight.sizes(), weight.strides(), options), std::nullopt,
      c10::fromIntArrayRefSlow(args.stride), c10::fromIntArrayRefSlow(args.padding),
      c10::fromIntArrayRefSlow(args.dilation), args.transposed, c10::fromIntArrayRefSlow(args.output_padding),
      args.groups, std::nullopt);
  return backend == ConvBackend::Mkldnn || backend == ConvBackend::MkldnnTranspose;
}

}  // namespace

int64_t weight_gradient_parts(const Tensor& grad, IntArrayRef input_sizes, IntArrayRef input_strides,
                              const Tensor& weight, const ConvArgs& args) {
  constexpr int64_t kLeast = 4 << 20, kLeastPart = 1 << 20, kMost = 8;  // bytes, bytes, parts
  const auto element = static_cast<int64_t>(weight.element_size()), bytes = weight.numel() * element;
  if (!(grad.is_cpu() || grad.is_meta()) || bytes < kLeast || !args.pad_after.empty() || weight.dim() < 3 ||
      weight.numel() < c10::multiply_integers(input_sizes) + grad.numel() ||
      !by_onednn(input_sizes, input_strides, weight, args))
    return 1;
  // A part has enough blocks for every thread.
  const int64_t blocks = weight.size(0) * weight.size(1) / (kBlock * kBlock) / (4 * at::get_num_threads());
  const int64_t units = args.groups > 1 ? args.groups : weight.size(1) / kBlock;
  // Two parts, each there twice, would take what the whole takes.
  const int64_t parts = std::min({bytes / kLeastPart, kMost, units, blocks});
  return parts > 2 ? parts : 1;
}

std::pair<Tensor, Tensor> weight_gradient_by_parts(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                   const ConvArgs& args, bool want_bias, int64_t parts) {
  const bool grouped = args.groups > 1;
  const bool cut_input = grouped || !args.transposed, cut_grad = grouped || args.transposed;
  const int64_t dim = grouped ? 0 : 1, all = grouped ? args.groups : weight.size(1);
  int64_t each = (all + parts - 1) / parts;
  if (!grouped) each = (each + kBlock - 1) / kBlock * kBlock;
  Tensor of_weight, of_bias;
  for (int64_t first = 0; first < all; first += each) {
    const int64_t count = std::min(each, all - first);
    const auto part = [&](const Tensor& t, int64_t d) {
      const int64_t per = t.size(d) / all;
      return t.narrow(d, first * per, count * per);
    };
    const Tensor x = cut_input ? part(input, 1) : input, dy = cut_grad ? part(grad, 1) : grad;
    const Tensor meta =
        at::empty(part(weight, dim).sizes(), grad.options().device(at::kMeta), weight.suggest_memory_format());
    const std::vector<int64_t> bias_sizes{dy.size(1)};
    const bool bias = want_bias && (cut_grad || first == 0);
    const auto [_, w, b] = at::convolution_backward(
        dy, x, shape_of(meta.sizes(), meta.strides(), grad.options()), at::OptionalIntArrayRef(bias_sizes), args.stride,
        args.padding, args.dilation, args.transposed, args.output_padding, grouped ? count : 1, {false, true, bias});
    if (!of_weight.defined()) of_weight = at::empty(weight.sizes(), w.options(), w.suggest_memory_format());
    part(of_weight, dim).copy_(w);
    if (!bias) continue;
    if (!of_bias.defined()) of_bias = at::empty({grad.size(1)}, b.options());
    (cut_grad ? part(of_bias, 0) : of_bias).copy_(b);
  }
  return {of_weight, of_bias};
}

}  // namespace tsmem
