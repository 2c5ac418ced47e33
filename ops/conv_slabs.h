// Convolutions that PyTorch runs as a product with a matrix of the input's patches, which is as many times as large as
// the input as the kernel has elements (27 in three dimensions): here for some rows of the output at a time, so that
// only a part of that matrix is ever there.
#pragma once
#include <ATen/ATen.h>

#include <array>

#include "common.h"

namespace tsmem {

// Of a convolution that is neither transposed nor grouped: a number a dimension.
struct ConvWindow {
  at::IntArrayRef stride, padding, dilation;
};

// Into how many slabs along the first spatial dimension the convolution of a batch is cut; 1: PyTorch makes no such
// matrix on this device, or it is small.
int64_t conv_slabs(const at::Tensor& input, const at::Tensor& weight, const ConvWindow& window);

// at::convolution by slabs.
at::Tensor conv_by_slabs(const at::Tensor& input, const at::Tensor& weight, const OptTensor& bias,
                         const ConvWindow& window, int64_t slabs);

// at::convolution_backward by slabs, without a graph. The gradients of the weight and the bias are sums over slabs.
std::array<at::Tensor, 3> conv_backward_by_slabs(const at::Tensor& grad, const at::Tensor& input,
                                                 const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
                                                 const ConvWindow& window, std::array<bool, 3> want, int64_t slabs);

}  // namespace tsmem
