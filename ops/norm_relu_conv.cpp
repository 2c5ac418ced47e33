#include "norm_relu_conv.h"

#include "conv_slabs.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {

using at::IntArrayRef;
using at::Tensor;

namespace {

using NormReluConvOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                    const Tensor& mean, const Tensor& invstd, const Tensor& conv_weight,
                                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation)>;
using GradientOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                const Tensor& invstd, const Tensor& grad, IntArrayRef weight_sizes, IntArrayRef stride,
                                IntArrayRef padding, IntArrayRef dilation)>;

using MayTakeOp =
    RawOp<bool(const Tensor& like, IntArrayRef input_sizes, IntArrayRef input_strides, IntArrayRef weight_sizes,
               IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool weight_gradient)>;

}  // namespace

NormRelu norm_relu_of(const std::vector<Tensor>& operands) {
  return {operands[0], optional(operands[1]), optional(operands[2]), operands[3], operands[4]};
}

bool may_take_norm_relu_conv(Wanted wanted, const Tensor& like, IntArrayRef input_sizes, IntArrayRef input_strides,
                             IntArrayRef weight_sizes, const ConvWindow& window) {
  static const MayTakeOp op("tsmem::_may_take_norm_relu_conv");
  // Fake tensors have a device's keys, and nothing that a kernel could read.
  if (like.key_set().has(c10::DispatchKey::Python) || !has_kernel(op.handle(), like)) return false;
  at::AutoDispatchBelowADInplaceOrView guard;
  return op(like, input_sizes, input_strides, weight_sizes, window.stride, window.padding, window.dilation,
            wanted == Wanted::weight_gradient);
}

Tensor norm_relu_conv(const NormRelu& norm, const Tensor& weight, const ConvWindow& window) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const NormReluConvOp op("tsmem::_norm_relu_conv");
  return op(norm.input, norm.weight, norm.bias, norm.mean, norm.invstd, weight, window.stride, window.padding,
            window.dilation);
}

Tensor norm_relu_conv_weight_gradient(const NormRelu& norm, const Tensor& grad, IntArrayRef weight_sizes,
                                      const ConvWindow& window) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const GradientOp op("tsmem::_norm_relu_conv_weight_gradient");
  return op(norm.input, norm.weight, norm.bias, norm.mean, norm.invstd, grad, weight_sizes, window.stride,
            window.padding, window.dilation);
}

void register_norm_relu_conv(torch::Library& m) {
  m.def(
      "_may_take_norm_relu_conv(Tensor like, int[] input_sizes, int[] input_strides, int[] weight_sizes, int[] stride, "
      "int[] padding, int[] dilation, bool weight_gradient) -> bool");
  m.def(
      "_norm_relu_conv(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor conv_weight, "
      "int[] stride, int[] padding, int[] dilation) -> Tensor");
  m.def(
      "_norm_relu_conv_weight_gradient(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor "
      "grad, int[] weight_sizes, int[] stride, int[] padding, int[] dilation) -> Tensor");
}

}  // namespace tsmem
