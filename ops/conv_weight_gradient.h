// The gradient of a convolution's weight that is large beside its input, some channels at a time: oneDNN makes it in a
// layout of its own and copies it into PyTorch's, and kernels of its that go by matrix products take a workspace of
// four times its size. Of a part both are small. The sums are the same: each element belongs to one part.
#pragma once
#include <ATen/ATen.h>

#include <utility>

#include "conv_args.h"

namespace tsmem {

// Into how many parts the gradient of this weight is cut: of the channels that the weight's second dimension counts, or
// of the groups. 1: it is small beside the input and the gradient, or oneDNN doesn't make it. Of tensors the shapes are
// read.
int64_t weight_gradient_parts(const at::Tensor& grad, at::IntArrayRef input_sizes, at::IntArrayRef input_strides,
                              const at::Tensor& weight, const ConvArgs& args);

// The gradients of the weight, of which the shape is read, and, if wanted, the bias: by so many parts and without a
// graph. `input` is batched.
std::pair<at::Tensor, at::Tensor> weight_gradient_by_parts(const at::Tensor& grad, const at::Tensor& input,
                                                           const at::Tensor& weight, const ConvArgs& args,
                                                           bool want_bias, int64_t parts);

}  // namespace tsmem
