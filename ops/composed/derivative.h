// The derivatives of activations by PyTorch's operators, for the composed raw ops.
#pragma once
#include <ATen/ATen.h>

#include "act.h"

namespace tsmem::composed {

// One bit an element of a one_bit() activation's input x, in the order of memory; the first element has the lowest bit
// of the first byte. x: dense. [ceil(numel / 8)] of bytes.
at::Tensor bits_of(const at::Tensor& x, const Act& act);

// The gradient before a one_bit() activation, from the bits of its input, in grad's strides, which are those that the
// input had. grad: dense.
at::Tensor gradient_from_bits(const at::Tensor& grad, const at::Tensor& bits, const Act& act);

// The gradient before any activation, from its input x.
at::Tensor gradient_from_input(const at::Tensor& grad, const at::Tensor& x, const Act& act);

}  // namespace tsmem::composed
