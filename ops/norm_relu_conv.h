// Convolutions of relu(batch_norm(x)) from x, so that the activation is never in memory: where backward needs one only
// for a convolution's weight, or runs the convolution again. Raw ops, for devices that have such kernels
// (cuda/cudnn_ops.cpp).
#pragma once
#include "common.h"

namespace tsmem {

struct ConvWindow;

// The operands of a recipe whose form is norm_relu; more may follow.
struct NormRelu {
  at::Tensor input;
  OptTensor weight, bias;
  at::Tensor mean, invstd;
};
NormRelu norm_relu_of(const std::vector<at::Tensor>& operands);
// How many operands those are.
constexpr size_t kNormReluOperands = 6;

// Whether a kernel may take a convolution in one group, without a bias and not transposed, of an input of these sizes
// and strides: its output, or the gradient of its weight. Asked before the norm's operands are made. like: a tensor of
// the input's dtype and device.
enum class Wanted : int64_t { output, weight_gradient };
bool may_take_norm_relu_conv(Wanted wanted, const at::Tensor& like, at::IntArrayRef input_sizes,
                             at::IntArrayRef input_strides, at::IntArrayRef weight_sizes, const ConvWindow& window);

// The output of such a convolution; undefined where no kernel takes it, or another way is faster.
at::Tensor norm_relu_conv(const NormRelu& norm, const at::Tensor& weight, const ConvWindow& window);

// The gradient of its weight from that of its output, as above.
at::Tensor norm_relu_conv_weight_gradient(const NormRelu& norm, const at::Tensor& grad, at::IntArrayRef weight_sizes,
                                          const ConvWindow& window);

}  // namespace tsmem
