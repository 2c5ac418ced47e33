// Activations and their derivatives over chunks, for kernels only (compiled once an instruction set, in namespace
// TSMEM_ISA).
//
// Elements are float (also for bf16 and f16, converted by the caller) or double. The loops are written for the
// vectoriser; float exp, log1p, tanh, erf are polynomials of our own fit (Chebyshev, error below 4e-9 relative), double
// ones are the C library's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "act_table.h"

// A loop with a call in it is not vectorised, and the compiler finds these too long to inline by itself.
#define TSMEM_ALWAYS __attribute__((always_inline))
#define TSMEM_INLINE static inline TSMEM_ALWAYS

namespace tsmem::TSMEM_ISA {

// --- Elementary functions

TSMEM_INLINE float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
TSMEM_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

// a * b + c, in one rounding where the instruction set has it. Compilers may not contract by themselves here: a
// pre-activation must be the same number wherever it is computed.
TSMEM_INLINE float mad(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial with these coefficients, the highest power's first.
template <class... C>
TSMEM_INLINE float polynomial(float x, float q, C... coefficients) {
  ((q = mad(q, x, coefficients)), ...);
  return q;
}

struct Reduced {
  float p, e1, e2;  // exp(x) = (1 + p) * e1 * e2, where |x| < 0.35 has e1 = e2 = 1
};

// x = k ln2 + r. Two factors for 2^k, as it may overflow or be denormal where exp(x) is not.
TSMEM_INLINE Reduced exp_reduce(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = mad(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: rounds to an integer in the low bits
  const float k = shifted - 12582912.0f;
  const uint32_t n = float_to_bits(shifted) - 0x4B400000u;
  const float r = mad(k, 2.12194440e-4f, mad(k, -0.693359375f, x));  // ln2 in two parts, the first exact times k
  const float q = polynomial(r, 1.989126851e-4f, 1.393390005e-3f, 8.333310675e-3f, 4.166646267e-2f, 1.666666668e-1f,
                             5.000000014e-1f);
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(n) >> 1);
  return {mad(r * r, q, r), bits_to_float((half + 127u) << 23), bits_to_float((n - half + 127u) << 23)};
}

TSMEM_INLINE float exp_of(float x) {
  const Reduced t = exp_reduce(x);
  return (1.0f + t.p) * t.e1 * t.e2;
}
TSMEM_INLINE float expm1_of(float x) {
  const Reduced t = exp_reduce(x);
  const float two_k = t.e1 * t.e2;
  return mad(two_k, t.p, two_k - 1.0f);
}
// log(1 + u) for u >= 0
TSMEM_INLINE float log1p_of(float u) {
  const float w = 1.0f + u;
  const float lost = (u - (w - 1.0f)) / w;            // what rounding to w dropped
  const uint32_t i = float_to_bits(w) - 0x3F3504F3u;  // relative to sqrt(1/2)
  const int32_t k = static_cast<int32_t>(i) >> 23;
  const float f = bits_to_float((i & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f, n = static_cast<float>(k);
  const float q = polynomial(f, 6.980701959e-2f, -1.149454661e-1f, 1.168907114e-1f, -1.242403772e-1f, 1.424855126e-1f,
                             -1.666785097e-1f, 2.000073050e-1f, -2.499999663e-1f, 3.333333112e-1f);
  const float r = mad(n, 0.693359375f, f + mad(f * f, mad(f, q, -0.5f), mad(n, -2.12194440e-4f, lost)));
  return w <= 3.4028234e38f ? r : w;  // infinity and NaN as they are
}
TSMEM_INLINE float tanh_of(float x) {
  const float a = x < 0 ? -x : x, s = x * x;
  const float q = polynomial(s, 2.214902743e-3f, -8.272456733e-3f, 2.174618709e-2f, -5.395634940e-2f, 1.333329075e-1f,
                             -3.333333308e-1f);
  const float small = mad(x, s * q, x), big = 1.0f - 2.0f / (exp_of(2.0f * a) + 1.0f), signed_big = x < 0 ? -big : big;
  return a < 0.625f ? small : signed_big;
}
TSMEM_INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
// exp(-x^2 / 2), with the rounding of x^2 mended: the upper half of x squares exactly, what the lower adds is small.
TSMEM_INLINE float gauss_of(float x) {
  const float hi = bits_to_float(float_to_bits(x) & 0xFFFFF000u), e = -0.5f * (x - hi) * (x + hi);
  return exp_of(-0.5f * hi * hi) * mad(e, mad(e, mad(e, 0.166666667f, 0.5f), 1.0f), 1.0f);
}
// The normal distribution function, erfc(-x / sqrt 2) / 2, accurate in its lower tail too. gauss: gauss_of(x).
TSMEM_INLINE float phi_of(float x, float gauss) {
  const float z = x * 0.707106781f, a = z < 0 ? -z : z, s = z * z;
  const float q = polynomial(s, -9.667044571e-6f, 1.126595903e-4f, -8.484080406e-4f, 5.221031808e-3f, -2.686543073e-2f,
                             1.128378250e-1f, -3.761263847e-1f, 1.128379167f);
  const float small = mad(0.5f, z * q, 0.5f);
  const float t = 1.0f / mad(0.5f, a, 1.0f);
  const float r = polynomial(t, -4.588436940e-3f, -5.003742799e-2f, 2.936748634e-1f, -5.315396169e-1f, 3.356447954e-1f,
                             -6.573992149e-2f, 2.181578522e-1f, 2.395371008e-1f, 2.828178100e-1f, 2.820636788e-1f);
  const float tail = 0.5f * gauss * (t * r);
  const float far = a < 8.0f ? tail : 0.0f, big = x < 0 ? far : 1.0f - far;
  const float finite = a < 0.5f ? small : big;
  return x == x ? finite : x;
}

TSMEM_INLINE double exp_of(double x) { return ::exp(x); }
TSMEM_INLINE double expm1_of(double x) { return ::expm1(x); }
TSMEM_INLINE double log1p_of(double x) { return ::log1p(x); }
TSMEM_INLINE double tanh_of(double x) { return ::tanh(x); }
TSMEM_INLINE double sigmoid_of(double x) { return 1.0 / (1.0 + ::exp(-x)); }
TSMEM_INLINE double gauss_of(double x) { return ::exp(-0.5 * x * x); }
TSMEM_INLINE double phi_of(double x, double) { return 0.5 * ::erfc(-x * 0.70710678118654752440); }

// --- Activations

// The elementary functions as the table's formulas ask for them.
namespace {
struct Math {
  template <class A>
  TSMEM_INLINE A exp_of(A x) {
    return TSMEM_ISA::exp_of(x);
  }
  template <class A>
  TSMEM_INLINE A expm1_of(A x) {
    return TSMEM_ISA::expm1_of(x);
  }
  template <class A>
  TSMEM_INLINE A log1p_of(A x) {
    return TSMEM_ISA::log1p_of(x);
  }
  template <class A>
  TSMEM_INLINE A tanh_of(A x) {
    return TSMEM_ISA::tanh_of(x);
  }
  template <class A>
  TSMEM_INLINE A sigmoid_of(A x) {
    return TSMEM_ISA::sigmoid_of(x);
  }
  template <class A>
  TSMEM_INLINE A gauss_of(A x) {
    return TSMEM_ISA::gauss_of(x);
  }
  template <class A>
  TSMEM_INLINE A phi_of(A x, A gauss) {
    return TSMEM_ISA::phi_of(x, gauss);
  }
  template <class A>
  TSMEM_INLINE A sixth_of(A x) {
    return x / A(6);
  }
  template <class A>
  TSMEM_INLINE A relu_of(A x) {
    return x <= A(0) ? A(0) : x;
  }
};
}  // namespace

template <class Row, class A>
static void forward_of(A* __restrict x, int64_t n, ActNumbers<A> p) {
  for (int64_t i = 0; i < n; ++i) x[i] = Row::template forward<Math>(x[i], p);
}
template <class Row, class A>
static void backward_of(const A* pre, const A* grad, A* out, int64_t n, ActNumbers<A> p) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = act_gradient<Row, Math>(pre[i], grad[i], p);
}
template <class Row, class A>
static void flags_of(const A* __restrict x, uint8_t* __restrict flags, int64_t n, ActNumbers<A> p) {
  for (int64_t i = 0; i < n; ++i) flags[i] = Row::upper(x[i], p);
}

// x[i] = act(x[i])
template <class A>
static void act_forward(A* x, int64_t n, const Act& act) {
  with_row(act.kind, [&](auto row) {
    if constexpr (row.kind != ActKind::identity) forward_of<decltype(row)>(x, n, numbers_of<A>(act));
  });
}

// out[i] = grad[i] * act'(pre[i]). out may be pre or grad.
template <class A>
static void act_backward(const A* pre, const A* grad, A* out, int64_t n, const Act& act) {
  if (act.kind == ActKind::identity) {
    if (out != grad) std::memmove(out, grad, n * sizeof(A));
    return;
  }
  with_row(act.kind, [&](auto row) { backward_of<decltype(row)>(pre, grad, out, n, numbers_of<A>(act)); });
}

// flags[i] = 1 where the derivative of a one_bit activation is its upper one, else 0.
template <class A>
static inline void act_flags(const A* x, uint8_t* flags, int64_t n, const Act& act) {
  with_row(act.kind, [&](auto row) {
    if constexpr (row.saves == ActSaves::bit) flags_of<decltype(row)>(x, flags, n, numbers_of<A>(act));
  });
}

// --- Bits

// Bit i of the packed bytes is flags[i]; flags has room for 7 more elements, which are set to 0.
static inline void pack_bits(uint8_t* __restrict flags, uint8_t* __restrict bits, int64_t n) {
  for (int64_t i = n; i & 7; ++i) flags[i] = 0;
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    bits[i >> 3] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
  }
}

// The reverse; writes up to 7 elements more than n.
static inline void unpack_bits(const uint8_t* __restrict bits, uint8_t* __restrict flags, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const uint64_t byte = bits[i >> 3];
    // Bit i moves to byte i: the low seven bits by one multiplication, the eighth apart.
    const uint64_t eight = ((byte & 0x7F) * 0x0002040810204081ull & 0x0101010101010101ull) | (byte >> 7) << 56;
    std::memcpy(flags + i, &eight, 8);
  }
}

// out[i] = grad[i] * the slope that flags[i] selects. A slope of 0 gives 0 also for an infinite or NaN gradient, as
// PyTorch's does.
template <class A>
static void flags_backward(const uint8_t* __restrict flags, const A* grad, A* out, int64_t n, const Act& act) {
  Slopes s;
  with_row(act.kind, [&](auto row) { s = slopes_of<decltype(row)>(act); });
  const A on = static_cast<A>(s.on), off = static_cast<A>(s.off);
  if (off == A(0)) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = flags[i] ? grad[i] * on : A(0);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = grad[i] * (flags[i] ? on : off);
  }
}

}  // namespace tsmem::TSMEM_ISA
