// The gradient of a convolution's weight that is large beside its input, some channels at a time: oneDNN makes it in a
// layout of its own and copies it into PyTorch's, and its kernels for matrix products take a workspace of four times
// its size. Of a part both are small. Each element belongs to one part, so that no sum is cut.
#pragma once
#include <ATen/ATen.h>

#include <utility>

#include "conv_args.h"

namespace tsmem {

// How many of the channels that the weight's second dimension counts (of the groups, where there are several) a part
// has. 0: the gradient is made as a whole, as it is small, too few channels or groups make parts that are enough for
// all threads, or oneDNN would not make the parts. `weight` and the input may be shapes without memory.
int64_t channels_together(const at::Tensor& grad, at::IntArrayRef input_sizes, at::IntArrayRef input_strides,
                          const at::Tensor& weight, const ConvArgs& args);

// The gradients of the weight, of which the shape is read, and, if wanted, the bias, by such parts and without a graph.
// `input` is batched.
std::pair<at::Tensor, at::Tensor> weight_gradient_by_parts(const at::Tensor& grad, const at::Tensor& input,
                                                           const at::Tensor& weight, const ConvArgs& args,
                                                           bool want_bias, int64_t together);

}  // namespace tsmem
