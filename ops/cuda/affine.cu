#include "cuda/affine.h"

#include "cuda/element.h"

namespace tsmem::cuda {

namespace {

constexpr unsigned kThreads = 128;

__device__ inline float size_of(float x) { return x < 0 ? -x : x; }

// Half the distance between 1 and the next number: what rounding changes at most, as a share.
template <class T>
constexpr float kRounding = 0x1p-9f;
template <>
constexpr float kRounding<f16> = 0x1p-11f;

template <class T>
__global__ void coefficients(AffineArgs a) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= a.channels) return;
  const float weight = number(a.weight, c, 1.0f), bias = number(a.bias, c, 0.0f);
  const float scale = a.invstd[c] * weight, shift = bias - a.mean[c] * scale;
  from_compute(scale, static_cast<T*>(a.scale)[c]);
  from_compute(shift, static_cast<T*>(a.shift)[c]);
  // Of the activation: at the mean, and what an x one deviation from it loses besides.
  const float of_scale = rounded<T>(scale) - scale, of_shift = rounded<T>(shift) - shift;
  const float lost = size_of(of_scale * a.mean[c] + of_shift) + size_of(of_scale) / a.invstd[c];
  const float most = 8 * kRounding<T> * max(size_of(weight), size_of(bias));
  if (!(lost <= most)) *a.lossy = 1;
}

}  // namespace

void affine(const AffineArgs& a, Stream stream) {
  launch("affine", a.dtype == Dtype::bf16 ? coefficients<bf16> : coefficients<f16>,
         (a.channels + kThreads - 1) / kThreads, Block{kThreads}, stream, a);
}

}  // namespace tsmem::cuda
