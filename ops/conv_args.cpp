#include "conv_args.h"

namespace tsmem {

using at::Tensor;

Tensor convolve(const Tensor& input, const Tensor& weight, const OptTensor& bias, const ConvArgs& args) {
  const Tensor x = args.pad_after.empty() ? input : at::constant_pad_nd(input, args.pad_after);
  return at::convolution(x, weight, bias, args.stride, args.padding, args.dilation, args.transposed,
                         args.output_padding, args.groups);
}

at::native::ConvBackend conv_backend(const Tensor& input, const Tensor& weight, const ConvArgs& args) {
  return at::native::select_conv_backend(input, weight, std::nullopt, c10::fromIntArrayRefSlow(args.stride),
                                         c10::fromIntArrayRefSlow(args.padding),
                                         c10::fromIntArrayRefSlow(args.dilation), args.transposed,
                                         c10::fromIntArrayRefSlow(args.output_padding), args.groups, std::nullopt);
}

}  // namespace tsmem
