// Chunks of the four dtypes as the type that is computed in, and scratch memory, for kernels only (compiled once an
// instruction set). Chunks that are float or double already are used where they lie.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace tsmem::TSMEM_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// What a dtype is computed in.
template <class T>
struct Acc {
  using type = float;
};
template <>
struct Acc<double> {
  using type = double;
};

typedef uint32_t __attribute__((may_alias)) Bits;  // of a float

static inline void widen(const bf16* __restrict x, float* __restrict out, int64_t n) {
  Bits* to = reinterpret_cast<Bits*>(out);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint32_t>(x[i].bits) << 16;
}

// Rounds to nearest even; NaN stays NaN.
static inline void narrow(const float* __restrict x, bf16* __restrict out, int64_t n) {
  const Bits* from = reinterpret_cast<const Bits*>(x);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = from[i], rounded = (u + (0x7FFFu + ((u >> 16) & 1u))) >> 16;
    out[i].bits = static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
}

static inline void widen(const f16* x, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < n; ++i) {
    _Float16 h;
    std::memcpy(&h, x + i, 2);
    out[i] = static_cast<float>(h);
  }
}

static inline void narrow(const float* x, f16* out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) {
    const _Float16 h = static_cast<_Float16>(x[i]);
    std::memcpy(out + i, &h, 2);
  }
}

// The chunk x[0, n) in the type it is computed in: x itself, or `buffer` filled from it.
template <class T, class A>
static inline const A* load(const T* x, A* buffer, int64_t n) {
  if constexpr (sizeof(T) == sizeof(A)) {
    return x;
  } else {
    widen(x, buffer, n);
    return buffer;
  }
}

// Where to compute a chunk that goes to out[0, n): out itself, or `buffer`, which store() then converts.
template <class T, class A>
static inline A* target(T* out, A* buffer) {
  if constexpr (sizeof(T) == sizeof(A))
    return out;
  else
    return buffer;
}
template <class T, class A>
static inline void store(const A* buffer, T* out, int64_t n) {
  if constexpr (sizeof(T) != sizeof(A)) narrow(buffer, out, n);
}

// Zeroed memory. Kernels use no templates of the standard library: the linker could take another instruction set's copy
// of them.
template <class A>
struct Scratch {
  A* data;
  explicit Scratch(int64_t n) : data(static_cast<A*>(std::calloc(n > 0 ? n : 1, sizeof(A)))) {
    if (!data) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A& operator[](int64_t i) { return data[i]; }
};

}  // namespace tsmem::TSMEM_ISA
