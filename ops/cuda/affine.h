// relu(batch_norm(x)) as relu(scale * x + shift) in numbers of 16 bits, as cuDNN's fused convolutions take it.
#pragma once
#include "cuda/args.h"

namespace tsmem::cuda {

struct AffineArgs {
  Dtype dtype = Dtype::f16;  // of scale and shift: f16 or bf16
  int64_t channels = 0;
  const float *mean = nullptr, *invstd = nullptr;
  Numbers weight, bias;
  void *scale = nullptr, *shift = nullptr;
  // Set to 1, in memory that the host reads too, where rounding them costs much more than rounding the activation does:
  // with a mean that is many deviations from 0, and with numbers too large or too small for the dtype.
  int32_t* lossy = nullptr;
};
void affine(const AffineArgs& args, Stream stream);

}  // namespace tsmem::cuda
