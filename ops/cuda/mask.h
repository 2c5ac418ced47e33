// One bit an element on a CUDA device: packing it in forward, applying it in backward. Bit e % 8 of byte e / 8.
#pragma once
#include "act.h"
#include "cuda/args.h"

namespace tsmem::cuda {

// y = act(x), and the bit that tells which of its two derivatives holds at x, for n elements. aligned: x and y start at
// multiples of 16 bytes.
void mask_pack(Dtype, const Act&, const void* x, void* y, uint8_t* mask, int64_t n, bool aligned, Stream);
// out = grad times the derivative that the bit chose.
void mask_apply(Dtype, const Act&, const void* grad, const uint8_t* mask, void* out, int64_t n, bool aligned, Stream);

}  // namespace tsmem::cuda
