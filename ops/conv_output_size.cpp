// What needs no more of a convolution's operands than their sizes: the sizes of its result, which a model reads of a
// conv output that is no longer made, and the gradient of its input.
#include <ATen/ATen.h>
#include <c10/core/WrapDimMinimal.h>
#include "common.h"
#include "registration.h"

namespace tsmem {

std::vector<int64_t> conv_output_size(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                                      at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                      at::IntArrayRef output_padding, int64_t groups) {
  const int64_t dims = weight.dim() - 2;
  const bool batched = input.dim() == weight.dim();
  TORCH_CHECK(dims > 0 && (batched || input.dim() == weight.dim() - 1), "Expected ", weight.dim() - 1,
              "D (unbatched) or ", weight.dim(), "D (batched) input to a convolution with a weight of ", weight.dim(),
              " dimensions, but got input of size: ", input.sizes());
  const auto at = [](at::IntArrayRef list, int64_t i) { return list.size() == 1 ? list[0] : list[i]; };
  std::vector<int64_t> size;
  if (batched) size.push_back(input.size(0));
  size.push_back(transposed ? weight.size(1) * groups : weight.size(0));
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t in = input.size(i + (batched ? 2 : 1)), reach = at(dilation, i) * (weight.size(i + 2) - 1) + 1;
    size.push_back(transposed ? (in - 1) * at(stride, i) - 2 * at(padding, i) + reach + at(output_padding, i)
                              : (in + 2 * at(padding, i) - reach) / at(stride, i) + 1);
  }
  return size;
}

at::Tensor conv_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::IntArrayRef input_sizes,
                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                               bool transposed, int64_t groups) {
  const bool depthwise = groups > 1 && weight.size(1) == 1;  // its kernels have no transposed form
  if (!dy.is_cuda() || depthwise) return {};
  const int64_t dims = weight.dim() - 2;
  std::vector<int64_t> rest(dims, 0);
  const auto sizes = conv_output_size(dy, weight, stride, padding, dilation, !transposed, rest, groups);
  for (int64_t d = 0; d < dims; ++d) {
    rest[d] = input_sizes[2 + d] - sizes[2 + d];
    const int64_t end = transposed ? 1 : stride[stride.size() == 1 ? 0 : d];
    if (rest[d] < 0 || rest[d] >= end) return {};
  }
  return at::convolution(dy, weight, {}, stride, padding, dilation, !transposed, rest, groups);
}

static int64_t conv_output_size_at(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                   at::IntArrayRef output_padding, int64_t groups, int64_t dim) {
  const auto sizes = conv_output_size(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  return sizes[c10::maybe_wrap_dim(dim, static_cast<int64_t>(sizes.size()))];
}

void register_conv_output_size(torch::Library& m) {
  m.def(
      "conv_output_size(Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, bool transposed, "
      "int[] output_padding, "
      "int groups) -> int[]",
      TORCH_FN(conv_output_size));
  m.def(
      "conv_output_size.dim(Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, bool transposed, "
      "int[] output_padding, int groups, int dim) -> int",
      TORCH_FN(conv_output_size_at));
}

}  // namespace tsmem
