// Activations and their derivatives over chunks, for kernels only (compiled once an instruction set, in namespace
// TSMEM_ISA).
//
// Elements are float (also for bf16 and f16, converted by the caller) or double. The loops are written for the
// vectoriser; float exp, log1p, tanh, erf are polynomials of our own fit (Chebyshev, error below 4e-9 relative), double
// ones are the C library's. Borders and NaN are stock's: see docs/ops/norm.md.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "act.h"

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
#if defined(__FMA__)
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

// Derivative of a one_bit activation: `on` where its bit is set, else `off`.
struct Slopes {
  double on, off;
};
static inline Slopes slopes(const Act& act) {
  switch (act.kind) {
    case ActKind::leaky_relu:
      return {1.0, act.a};
    case ActKind::hardsigmoid:
      // Exactly rounded in float64 too, as TorchScript's own derivative; eager mode's constant is a float32 there.
      return {1.0 / 6.0, 0.0};
    default:
      return {1.0, 0.0};
  }
}

// Calls f with a function of the element that computes the activation.
template <class A, class F>
static inline void with_act(const Act& act, F f) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b), c = static_cast<A>(act.c), zero = 0, one = 1,
          half = A(0.5);
  switch (act.kind) {
    case ActKind::identity:
      return;
    case ActKind::relu:
      return f([=](A x) TSMEM_ALWAYS { return x <= zero ? zero : x; });
    case ActKind::hardtanh:
      return f([=](A x) TSMEM_ALWAYS {
        const A low = x < a ? a : x;
        return low > b ? b : low;
      });
    case ActKind::threshold:
      return f([=](A x) TSMEM_ALWAYS { return x <= a ? b : x; });
    case ActKind::leaky_relu:
      return f([=](A x) TSMEM_ALWAYS {
        const A scaled = x * a;
        return x > zero ? x : scaled;
      });
    case ActKind::hardsigmoid:
      return f([=](A x) TSMEM_ALWAYS {
        const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
        return (mid + A(3)) / A(6);
      });
    case ActKind::silu:
      return f([=](A x) TSMEM_ALWAYS { return x / (one + exp_of(-x)); });
    case ActKind::hardswish:
      return f([=](A x) TSMEM_ALWAYS {
        const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
        return x * (mid + A(3)) / A(6);
      });
    case ActKind::gelu:
      return f([=](A x) TSMEM_ALWAYS { return x * phi_of(x, gauss_of(x)); });
    case ActKind::gelu_tanh:
      return f([=](A x) TSMEM_ALWAYS {
        const A inner = A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);
        return half * x * (one + tanh_of(inner));
      });
    case ActKind::sigmoid:
      return f([=](A x) TSMEM_ALWAYS { return sigmoid_of(x); });
    case ActKind::tanh:
      return f([=](A x) TSMEM_ALWAYS { return tanh_of(x); });
    case ActKind::elu:
      return f([=](A x) TSMEM_ALWAYS {
        const A lower = expm1_of(x * c) * (a * b), upper = x * b;
        return x <= zero ? lower : upper;
      });
    case ActKind::softplus:
      return f([=](A x) TSMEM_ALWAYS {
        const A z = x * a, soft = log1p_of(exp_of(z)) / a;
        return z > b ? x : soft;
      });
    case ActKind::mish:
      return f([=](A x) TSMEM_ALWAYS {
        const A e = exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2)), soft = x * (n / (n + A(2)));
        return x > A(40) ? x : soft;
      });
  }
}

// Calls f with a function (pre-activation, gradient) -> gradient times the derivative there.
template <class A, class F>
static inline void with_act_backward(const Act& act, F f) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b), c = static_cast<A>(act.c), zero = 0, one = 1,
          half = A(0.5);
  switch (act.kind) {
    case ActKind::identity:
      return;
    case ActKind::relu:
      return f([=](A x, A g) TSMEM_ALWAYS { return x <= zero ? zero : g; });
    case ActKind::hardtanh:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A low = x <= a ? zero : g;
        return x >= b ? zero : low;
      });
    case ActKind::threshold:
      return f([=](A x, A g) TSMEM_ALWAYS { return x <= a ? zero : g; });
    case ActKind::leaky_relu:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A scaled = g * a;
        return x > zero ? g : scaled;
      });
    case ActKind::hardsigmoid:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A inside = g * A(1.0 / 6.0), low = x > A(-3) ? inside : zero;  // see slopes()
        return x < A(3) ? low : zero;
      });
    case ActKind::silu:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A s = sigmoid_of(x);
        return g * s * (one + x * (one - s));
      });
    case ActKind::hardswish:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A inside = g * (x / A(3) + half), low = x <= A(-3) ? zero : g;
        const A in = x < A(3) ? inside : g;
        return x > A(-3) ? in : low;
      });
    case ActKind::gelu:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A gauss = gauss_of(x);
        return g * (phi_of(x, gauss) + x * (A(0.39894228040143267794) * gauss));
      });
    case ActKind::gelu_tanh:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A t = tanh_of(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x));
        const A inner = A(0.79788456080286535588) * (one + A(3 * 0.044715) * x * x);
        return g * (half * (one + t) + half * x * (one - t * t) * inner);
      });
    case ActKind::sigmoid:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A s = sigmoid_of(x);
        return g * (one - s) * s;
      });
    case ActKind::tanh:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A t = tanh_of(x);
        return g * (one - t * t);
      });
    case ActKind::elu:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A lower = g * c * (a * b) * exp_of(x * c), upper = g * b;
        return x <= zero ? lower : upper;
      });
    case ActKind::softplus:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A z = x * a, e = exp_of(z > b ? b : z), soft = g * (e / (e + one));
        return z > b ? g : soft;
      });
    case ActKind::mish:
      return f([=](A x, A g) TSMEM_ALWAYS {
        const A e = exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2)), d = n + A(2);
        const A soft = g * (n / d + x * (A(4) * e * (e + one) / d / d));
        return x > A(40) ? g : soft;
      });
  }
}

// x[i] = act(x[i])
template <class A>
static void act_forward(A* __restrict x, int64_t n, const Act& act) {
  with_act<A>(act, [=](auto f) {
    for (int64_t i = 0; i < n; ++i) x[i] = f(x[i]);
  });
}

// out[i] = grad[i] * act'(pre[i]). out may be pre or grad.
template <class A>
static void act_backward(const A* pre, const A* grad, A* out, int64_t n, const Act& act) {
  if (act.kind == ActKind::identity) {
    if (out != grad) std::memmove(out, grad, n * sizeof(A));
    return;
  }
  with_act_backward<A>(act, [=](auto f) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = f(pre[i], grad[i]);
  });
}

// flags[i] = 1 where the derivative of a one_bit activation is slopes(act).on, else 0.
template <class A>
static inline void act_flags(const A* __restrict x, uint8_t* __restrict flags, int64_t n, const Act& act) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b);
  switch (act.kind) {
    case ActKind::relu:
      for (int64_t i = 0; i < n; ++i) flags[i] = !(x[i] <= A(0));
      return;
    case ActKind::hardtanh:
      for (int64_t i = 0; i < n; ++i) flags[i] = !(x[i] <= a) & !(x[i] >= b);
      return;
    case ActKind::threshold:
      for (int64_t i = 0; i < n; ++i) flags[i] = !(x[i] <= a);
      return;
    case ActKind::hardsigmoid:
      for (int64_t i = 0; i < n; ++i) flags[i] = (x[i] > A(-3)) & (x[i] < A(3));
      return;
    default:  // leaky_relu
      for (int64_t i = 0; i < n; ++i) flags[i] = x[i] > A(0);
  }
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
// stock's does.
template <class A>
static void flags_backward(const uint8_t* __restrict flags, const A* grad, A* out, int64_t n, const Act& act) {
  const Slopes s = slopes(act);
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
