// Elements of the four dtypes, and blocks of eight of them as the type that is computed in: float, for double double.
// Included by *.kernel.cpp only; everything has internal linkage, as each instruction set compiles its own.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/kernels.h"

namespace tsmem {
namespace {

#if !defined(__F16C__)
#if defined(__aarch64__)
using Half = __fp16;  // GCC has _Float16 in C++ from version 13 on
#else
using Half = _Float16;
#endif
#endif

inline float to_compute(float x) { return x; }
inline double to_compute(double x) { return x; }
inline float to_compute(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float to_compute(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  Half h;
  std::memcpy(&h, &x.bits, 2);
  return static_cast<float>(h);
#endif
}

// Rounds to nearest even, as ATen does.
inline void from_compute(float x, float& out) { out = x; }
inline void from_compute(double x, double& out) { out = x; }
inline void from_compute(float x, bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = x != x ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded);
}
inline void from_compute(float x, f16& out) {
#if defined(__F16C__)
  out.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Half h = static_cast<Half>(x);
  std::memcpy(&out.bits, &h, 2);
#endif
}

// n elements to and from the type that is computed in.
template <class T>
inline void widen(const T* from, compute_t<T>* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (sizeof(T) == 2 && __is_same(T, f16))
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = to_compute(from[i]);
}
template <class T>
inline void narrow(const compute_t<T>* from, T* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (sizeof(T) == 2 && __is_same(T, f16))
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) from_compute(from[i], to[i]);
}

}  // namespace
}  // namespace tsmem
