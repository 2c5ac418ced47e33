// What host code and kernels share: plain structs, and the headers of CUDA or, with TSMEM_EMULATE_CUDA, of the threads
// and warps that run on the CPU (tests/cuda/emulate.h), so that the same kernels are tested on machines without a
// device. No torch headers.
#pragma once
#include <cstdint>

#include "dtype.h"
#ifdef TSMEM_EMULATE_CUDA
#include "emulate.h"
#else
#include <cuda_runtime.h>
#endif

namespace tsmem::cuda {

#ifdef TSMEM_EMULATE_CUDA
using Stream = void*;
#else
using Stream = cudaStream_t;
#endif

struct Block {
  unsigned x = 1, y = 1;
};

// A small vector of parameters or running statistics, of any of the four dtypes; null: none.
struct Numbers {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t stride = 1;
};

// Division by a number that is known at launch: one multiplication where all that is divided lies below 2^31 (Granlund
// and Montgomery, 1994), else the 64-bit division that the hardware lacks.
struct Divider {
  int64_t divisor = 1;
  uint32_t factor = 1, shift = 0;
  bool fits = false;

  Divider() = default;
  // `largest`: what may be divided.
  Divider(int64_t d, int64_t largest) : divisor(d), fits(d > 0 && d <= INT32_MAX && largest <= INT32_MAX) {
    if (!fits) return;
    while ((int64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }
  __host__ __device__ int64_t divide(int64_t n) const {
    if (!fits) return n / divisor;
    const auto low = static_cast<uint32_t>(n);
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(low) * factor) >> 32);
    return (high + low) >> shift;
  }
  // n / divisor, and n becomes n % divisor.
  __host__ __device__ int64_t split(int64_t& n) const {
    const int64_t q = divide(n);
    n -= q * divisor;
    return q;
  }
};

}  // namespace tsmem::cuda
