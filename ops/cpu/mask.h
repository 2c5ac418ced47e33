// One bit an element: packing it in forward, applying it in backward.
#pragma once
#include "act.h"
#include "cpu/kernels.h"

namespace tsmem {

struct MaskKernels {
  // y[i] = act(x[i]), and bit i % 8 of mask[i / 8] tells which of its two derivatives holds at x[i]. n elements; only
  // bits below n are defined. `act` is one of the one_bit() kinds except hardsigmoid, whose y is not written (it may be
  // null). y may be null, x may be y.
  void (*pack)(Dtype dtype, const Act& act, const void* x, void* y, uint8_t* mask, int64_t n);
  // out[i] = grad[i] times the derivative that bit i chose.
  void (*apply)(Dtype dtype, const Act& act, const void* grad, const uint8_t* mask, void* out, int64_t n);
};

const MaskKernels& mask_kernels();

}  // namespace tsmem
