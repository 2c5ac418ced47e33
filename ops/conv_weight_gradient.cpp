#include "conv_weight_gradient.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace tsmem {

using at::IntArrayRef;
using at::Tensor;

namespace {

// At most so many channels are together in oneDNN's layouts.
constexpr int64_t kBlockOfChannels = 16;

// How a convolution's channels are cut.
struct Cut {
  bool grouped, input, grad;  // there are groups; of the input and of the gradient a part has some channels
  int64_t dim, all;           // of the weight, and the number of its channels or groups

  Cut(const Tensor& weight, const ConvArgs& args)
      : grouped(args.groups > 1),
        input(grouped || !args.transposed),
        grad(grouped || args.transposed),
        dim(grouped ? 0 : 1),
        all(grouped ? args.groups : weight.size(1)) {}

  // Of a dimension of this size, what belongs to so many of `all`.
  int64_t share(int64_t size, int64_t count) const { return size / all * count; }
  Tensor part(const Tensor& t, int64_t d, int64_t first, int64_t count) const {
    return t.narrow(d, share(t.size(d), first), share(t.size(d), count));
  }
};

bool is_onednns(const Tensor& input, const Tensor& weight, const ConvArgs& args) {
  using at::native::ConvBackend;
  const ConvBackend backend = conv_backend(input, weight, args);
  return backend == ConvBackend::Mkldnn || backend == ConvBackend::MkldnnTranspose;
}

// As PyTorch runs a convolution in one dimension, of a contiguous input.
ConvArgs in_two_dimensions(ConvArgs args) {
  for (auto* list : {&args.stride, &args.dilation}) list->insert(list->begin(), 1);
  for (auto* list : {&args.padding, &args.output_padding}) list->insert(list->begin(), 0);
  return args;
}

}  // namespace

int64_t channels_together(const Tensor& grad, IntArrayRef input_sizes, IntArrayRef input_strides, const Tensor& weight,
                          const ConvArgs& args) {
  constexpr int64_t kLeast = 4 << 20, kLeastPart = 1 << 20, kMost = 8;  // bytes, bytes, parts
  const int64_t bytes = weight.numel() * static_cast<int64_t>(weight.element_size());
  if (!(grad.is_cpu() || grad.is_meta()) || bytes < kLeast || !args.pad_after.empty() || weight.dim() < 3 ||
      weight.numel() < c10::multiply_integers(input_sizes) + grad.numel())
    return 0;
  const Cut cut(weight, args);
  const int64_t blocks_of_a_thread =
      weight.size(0) * weight.size(1) / (kBlockOfChannels * kBlockOfChannels) / at::get_num_threads();
  const int64_t parts = std::min({bytes / kLeastPart, kMost, blocks_of_a_thread / 4});
  if (parts < 2) return 0;
  int64_t together = (cut.all + parts - 1) / parts;
  if (!cut.grouped) together = (together + kBlockOfChannels - 1) / kBlockOfChannels * kBlockOfChannels;
  // Two parts, each there twice, would take what the whole takes.
  if (2 * together >= cut.all) return 0;

  if (weight.dim() == 3) {
    const Tensor x = shape_of(input_sizes, c10::contiguous_strides(input_sizes), weight.scalar_type()).unsqueeze(2);
    return channels_together(grad.unsqueeze(2), x.sizes(), x.strides(), weight.unsqueeze(2), in_two_dimensions(args));
  }
  // The last part is the smallest. The meta device stands for the CPU.
  const int64_t rest = cut.all % together, least = rest > 0 ? rest : together;
  const auto options = at::TensorOptions(weight.scalar_type());
  const Tensor x = shape_of(input_sizes, input_strides, options),
               w = shape_of(weight.sizes(), weight.strides(), options);
  ConvArgs of_part = args;
  if (cut.grouped) of_part.groups = least;
  const bool by_onednn = is_onednns(x, w, args) &&
                         is_onednns(cut.input ? cut.part(x, 1, 0, least) : x, cut.part(w, cut.dim, 0, least), of_part);
  return by_onednn ? together : 0;
}

std::pair<Tensor, Tensor> weight_gradient_by_parts(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                   const ConvArgs& args, bool want_bias, int64_t together) {
  if (weight.dim() == 3) {
    const auto [w, b] = weight_gradient_by_parts(grad.unsqueeze(2), input.contiguous().unsqueeze(2),
                                                 weight.unsqueeze(2), in_two_dimensions(args), want_bias, together);
    return {w.squeeze(2), b};
  }
  const Cut cut(weight, args);
  Tensor of_weight, of_bias;
  for (int64_t first = 0; first < cut.all; first += together) {
    const int64_t count = std::min(together, cut.all - first);
    const Tensor x = cut.input ? cut.part(input, 1, first, count) : input;
    const Tensor dy = cut.grad ? cut.part(grad, 1, first, count) : grad;
    // A view of the weight itself may be no dense tensor; without memory that makes no difference.
    const Tensor view = cut.part(weight, cut.dim, first, count);
    const Tensor shape = grad.is_meta() ? view : shape_in(view.sizes(), weight.suggest_memory_format(), grad.options());
    const std::vector<int64_t> bias_sizes{dy.size(1)};
    const bool bias = want_bias && (cut.grad || first == 0);
    const auto [_, w, b] = at::convolution_backward(dy, x, shape, at::OptionalIntArrayRef(bias_sizes), args.stride,
                                                    args.padding, args.dilation, args.transposed, args.output_padding,
                                                    cut.grouped ? count : 1, {false, true, bias});
    if (!of_weight.defined()) of_weight = at::empty(weight.sizes(), w.options(), w.suggest_memory_format());
    cut.part(of_weight, cut.dim, first, count).copy_(w);
    if (!bias) continue;
    if (!cut.grad)
      of_bias = b;
    else if (!of_bias.defined())
      of_bias = at::empty({grad.size(1)}, b.options());
    if (cut.grad) cut.part(of_bias, 0, first, count).copy_(b);
  }
  return {of_weight, of_bias};
}

}  // namespace tsmem
