#include "conv_args.h"

namespace tsmem {

using at::Tensor;
using torch::autograd::AutogradContext;

void save_conv(AutogradContext* ctx, const ConvArgs& args) {
  auto& data = ctx->saved_data;
  data["stride"] = args.stride;
  data["padding"] = args.padding;
  data["dilation"] = args.dilation;
  data["output_padding"] = args.output_padding;
  data["pad_after"] = args.pad_after;
  data["transposed"] = args.transposed;
  data["groups"] = args.groups;
}

ConvArgs saved_conv(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  const auto ints = [&](const char* name) { return data[name].toIntVector(); };
  return {
      ints("stride"),         ints("padding"),  ints("dilation"), ints("output_padding"), data["transposed"].toBool(),
      data["groups"].toInt(), ints("pad_after")};
}

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
