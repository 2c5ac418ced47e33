// What at::convolution and at::convolution_backward want to know beside tensors.
#pragma once
#include <ATen/ATen.h>
#include <ATen/native/ConvUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "common.h"

namespace tsmem {

// Lists have an entry a dimension.
struct ConvArgs {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed = false;
  int64_t groups = 1;
  // Zeros appended to the input, last dimension first as in constant_pad_nd, for an asymmetric padding='same'.
  std::vector<int64_t> pad_after = {};
};

// Keeps them with a node, and reads them in its backward.
void save_conv(torch::autograd::AutogradContext* ctx, const ConvArgs& args);
ConvArgs saved_conv(torch::autograd::AutogradContext* ctx);

// at::convolution of a batch.
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const OptTensor& bias, const ConvArgs& args);

// Which of PyTorch's implementations computes that. Of the tensors sizes, strides, dtype and device are read.
at::native::ConvBackend conv_backend(const at::Tensor& input, const at::Tensor& weight, const ConvArgs& args);

}  // namespace tsmem
