// Elements of the four dtypes on the device, eight at a time.
//
// An octet is eight neighbours in memory whose first has an index that is a multiple of 8: 16 bytes of bf16 and f16, 32
// of f32, 64 of f64, read and written by 16-byte accesses, and one byte of a mask. A thread that holds an octet makes
// or reads its byte alone, with no exchange between threads.
#pragma once
#include <cstring>

#include "cuda/launch.h"
#include "dtype.h"
#ifdef TSMEM_EMULATE_CUDA
#include "cpu/convert.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace tsmem::cuda {

// Rounded to nearest even, as ATen does. Emulated, the CPU kernels'.
#ifndef TSMEM_EMULATE_CUDA
__device__ inline float to_compute(float x) { return x; }
__device__ inline double to_compute(double x) { return x; }
__device__ inline void from_compute(float x, float& out) { out = x; }
__device__ inline void from_compute(double x, double& out) { out = x; }
__device__ inline float to_compute(bf16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
__device__ inline float to_compute(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline void from_compute(float x, bf16& out) { out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ inline void from_compute(float x, f16& out) { out.bits = __half_as_ushort(__float2half_rn(x)); }
#endif

// x as it is once it has been stored as a T.
template <class T>
__device__ inline compute_t<T> rounded(compute_t<T> x) {
  T stored;
  from_compute(x, stored);
  return to_compute(stored);
}

template <class T>
__device__ inline void store_octet(const compute_t<T> (&v)[8], T* p, bool aligned, int lo, int hi) {
  T own[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) from_compute(v[k], own[k]);
  if (aligned && lo == 0 && hi == 8) {
    uint4 raw[sizeof(own) / 16];
    memcpy(raw, own, sizeof(own));
#pragma unroll
    for (unsigned i = 0; i < sizeof(own) / 16; ++i) reinterpret_cast<uint4*>(p)[i] = raw[i];
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k >= lo && k < hi) p[k] = own[k];
}

// Eight neighbours as they lie in memory: what has been read and not yet been converted, so that a thread can have
// several reads under way.
template <class T>
struct alignas(16) Octet {
  T of[8];
};

// Elements [lo, hi) of the eight from p on; the others are anything: who converts them leaves them out, so that nothing
// waits for the read here. by_16: p is a multiple of 16 bytes, and all eight may be read; else no other memory is.
// whole: lo is 0, hi is 8, and by_16 holds.
template <bool whole, class T>
__device__ inline Octet<T> read_octet(const T* p, bool by_16, int lo, int hi) {
  Octet<T> own;
  if (whole || by_16) {
    uint4 raw[sizeof(own) / 16];
#pragma unroll
    for (unsigned i = 0; i < sizeof(own) / 16; ++i) raw[i] = reinterpret_cast<const uint4*>(p)[i];
    memcpy(&own, raw, sizeof(own));
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) own.of[k] = k >= lo && k < hi ? p[k] : T{};
  }
  return own;
}

template <class T>
__device__ inline void numbers_in(const Octet<T>& own, compute_t<T> (&v)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = to_compute(own.of[k]);
}

template <class A>
__device__ inline A number(const Numbers& n, int64_t i, A otherwise) {
  if (!n.data) return otherwise;
  i *= n.stride;
  switch (n.dtype) {
    case Dtype::f32:
      return static_cast<A>(static_cast<const float*>(n.data)[i]);
    case Dtype::f64:
      return static_cast<A>(static_cast<const double*>(n.data)[i]);
    case Dtype::bf16:
      return static_cast<A>(to_compute(static_cast<const bf16*>(n.data)[i]));
    default:
      return static_cast<A>(to_compute(static_cast<const f16*>(n.data)[i]));
  }
}

__device__ inline void set_number(const Numbers& n, int64_t i, double value) {
  i *= n.stride;
  void* data = const_cast<void*>(n.data);
  switch (n.dtype) {
    case Dtype::f32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case Dtype::f64:
      static_cast<double*>(data)[i] = value;
      return;
    case Dtype::bf16:
      from_compute(static_cast<float>(value), static_cast<bf16*>(data)[i]);
      return;
    default:
      from_compute(static_cast<float>(value), static_cast<f16*>(data)[i]);
  }
}

}  // namespace tsmem::cuda
