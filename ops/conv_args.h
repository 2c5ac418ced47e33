// What at::convolution and at::convolution_backward want to know beside tensors.
#pragma once
#include <cstdint>
#include <vector>

namespace tsmem {

// Lists have an entry a dimension. `pad_after`: zeros appended to the input, last dimension first as in
// constant_pad_nd, for an asymmetric padding='same'.
struct ConvArgs {
  std::vector<int64_t> stride, padding, dilation, output_padding, pad_after;
  bool transposed = false;
  int64_t groups = 1;
};

}  // namespace tsmem
