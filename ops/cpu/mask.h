// One bit an element: packing it in forward, applying it in backward.
#pragma once
#include "act_table.h"
#include "cpu/kernels.h"

namespace tsmem {

// Whether pack() writes the activation's output too: of those for which that is cheap. That of others is PyTorch's.
inline bool mask_writes_output(ActKind kind) {
  return kind == ActKind::relu || kind == ActKind::hardtanh || kind == ActKind::threshold ||
         kind == ActKind::leaky_relu;
}

struct MaskKernels {
  // y[i] = act(x[i]), where mask_writes_output(), and bit i % 8 of mask[i / 8] tells which of its two derivatives holds
  // at x[i]. n elements; only bits below n are defined. `act` is one of the one_bit() kinds. y may be null, x may be y.
  void (*pack)(Dtype dtype, const Act& act, const void* x, void* y, uint8_t* mask, int64_t n);
  // out[i] = grad[i] times the derivative that bit i chose.
  void (*apply)(Dtype dtype, const Act& act, const void* grad, const uint8_t* mask, void* out, int64_t n);
};

const MaskKernels& mask_kernels();

}  // namespace tsmem
