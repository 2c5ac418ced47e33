#pragma once
#include "common.h"

namespace tsmem {

// at::linear on the rows of all leading dimensions at once: without a gradient in sight, where that costs no copy of
// the input, it would take each image by itself, with a copy of the weight for each. input: one dimension or more
// before the last; weight: [out, in]. The output is contiguous.
at::Tensor linear_of_rows(const at::Tensor& input, const at::Tensor& weight, const OptTensor& bias);

}  // namespace tsmem
