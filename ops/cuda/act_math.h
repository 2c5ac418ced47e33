// Activations and their derivatives on the device. Borders and NaN are the CPU kernels' and stock's (cpu/act_math.h);
// the elementary functions are CUDA's own, which are as accurate as stock's.
#pragma once
#include <cmath>

#include "act.h"
#include "cuda/launch.h"

namespace tsmem::cuda {

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float expm1_of(float x) { return expm1f(x); }
__device__ inline double expm1_of(double x) { return expm1(x); }
__device__ inline float log1p_of(float x) { return log1pf(x); }
__device__ inline double log1p_of(double x) { return log1p(x); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }
// The normal distribution function, accurate in its lower tail too.
__device__ inline float phi_of(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
__device__ inline double phi_of(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
// Never left to the compiler's choice: forward and backward must round alike where they decide the same bit.
__device__ inline float fma_of(float x, float y, float z) { return fmaf(x, y, z); }
__device__ inline double fma_of(double x, double y, double z) { return fma(x, y, z); }

// x = act(x) for eight elements. The kind is the same for all threads: one branch an octet.
template <class A>
__device__ inline void act_octet(A (&x)[8], const Act& act) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b), c = static_cast<A>(act.c);
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = f(x[k]);
  };
  switch (act.kind) {
    case ActKind::identity:
      return;
    case ActKind::relu:
      return each([](A x) { return x < A(0) ? A(0) : x; });  // a zero keeps its sign
    case ActKind::hardtanh:
      return each([=](A x) {
        const A low = x < a ? a : x;
        return low > b ? b : low;
      });
    case ActKind::threshold:
      return each([=](A x) { return x <= a ? b : x; });
    case ActKind::leaky_relu:
      return each([=](A x) { return x > A(0) ? x : x * a; });
    case ActKind::hardsigmoid:
      return each([](A x) {
        const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
        return (mid + A(3)) / A(6);
      });
    case ActKind::silu:
      return each([](A x) { return x / (A(1) + exp_of(-x)); });
    case ActKind::hardswish:
      return each([](A x) {
        const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
        return x * (mid + A(3)) / A(6);
      });
    case ActKind::gelu:
      return each([](A x) { return x * phi_of(x); });
    case ActKind::gelu_tanh:
      return each([](A x) {
        const A inner = A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);
        return A(0.5) * x * (A(1) + tanh_of(inner));
      });
    case ActKind::sigmoid:
      return each([](A x) { return A(1) / (A(1) + exp_of(-x)); });
    case ActKind::tanh:
      return each([](A x) { return tanh_of(x); });
    case ActKind::elu:
      return each([=](A x) { return x <= A(0) ? expm1_of(x * c) * (a * b) : x * b; });
    case ActKind::softplus:
      return each([=](A x) {
        const A z = x * a;
        return z > b ? x : log1p_of(exp_of(z)) / a;
      });
    case ActKind::mish:
      return each([](A x) {
        const A e = exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2));
        return x > A(40) ? x : x * (n / (n + A(2)));
      });
  }
}

// g = g * act'(x) for eight elements.
template <class A>
__device__ inline void act_backward_octet(const A (&x)[8], A (&g)[8], const Act& act) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b), c = static_cast<A>(act.c);
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < 8; ++k) g[k] = f(x[k], g[k]);
  };
  switch (act.kind) {
    case ActKind::identity:
      return;
    case ActKind::relu:
      return each([](A x, A g) { return x <= A(0) ? A(0) : g; });
    case ActKind::hardtanh:
      return each([=](A x, A g) { return x <= a || x >= b ? A(0) : g; });
    case ActKind::threshold:
      return each([=](A x, A g) { return x <= a ? A(0) : g; });
    case ActKind::leaky_relu:
      return each([=](A x, A g) { return x > A(0) ? g : g * a; });
    case ActKind::hardsigmoid:
      return each([](A x, A g) { return x > A(-3) && x < A(3) ? g * A(1.0 / 6.0) : A(0); });
    case ActKind::silu:
      return each([](A x, A g) {
        const A s = A(1) / (A(1) + exp_of(-x));
        return g * s * (A(1) + x * (A(1) - s));
      });
    case ActKind::hardswish:
      return each([](A x, A g) {
        if (!(x > A(-3))) return x <= A(-3) ? A(0) : g;  // NaN passes the gradient, as stock's
        return x < A(3) ? g * (x / A(3) + A(0.5)) : g;
      });
    case ActKind::gelu:
      return each([](A x, A g) { return g * (phi_of(x) + x * (A(0.39894228040143267794) * exp_of(A(-0.5) * x * x))); });
    case ActKind::gelu_tanh:
      return each([](A x, A g) {
        const A t = tanh_of(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x));
        const A inner = A(0.79788456080286535588) * (A(1) + A(3 * 0.044715) * x * x);
        return g * (A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner);
      });
    case ActKind::sigmoid:
      return each([](A x, A g) {
        const A s = A(1) / (A(1) + exp_of(-x));
        return g * (A(1) - s) * s;
      });
    case ActKind::tanh:
      return each([](A x, A g) {
        const A t = tanh_of(x);
        return g * (A(1) - t * t);
      });
    case ActKind::elu:
      return each([=](A x, A g) { return x <= A(0) ? g * c * (a * b) * exp_of(x * c) : g * b; });
    case ActKind::softplus:
      return each([=](A x, A g) {
        const A z = x * a, e = exp_of(z > b ? b : z);
        return z > b ? g : g * (e / (e + A(1)));
      });
    case ActKind::mish:
      return each([](A x, A g) {
        const A e = exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2)), d = n + A(2);
        return x > A(40) ? g : g * (n / d + x * (A(4) * e * (e + A(1)) / d / d));
      });
  }
}

// Bit k: which of a one_bit activation's two derivatives holds at x[k].
template <class A>
__device__ inline unsigned act_bits(const A (&x)[8], const Act& act) {
  const A a = static_cast<A>(act.a), b = static_cast<A>(act.b);
  unsigned bits = 0;
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < 8; ++k) bits |= (f(x[k]) ? 1u : 0u) << k;
  };
  switch (act.kind) {
    case ActKind::relu:
      each([](A x) { return !(x <= A(0)); });
      break;
    case ActKind::hardtanh:
      each([=](A x) { return !(x <= a) && !(x >= b); });
      break;
    case ActKind::threshold:
      each([=](A x) { return !(x <= a); });
      break;
    case ActKind::hardsigmoid:
      each([](A x) { return x > A(-3) && x < A(3); });
      break;
    default:  // leaky_relu
      each([](A x) { return x > A(0); });
  }
  return bits;
}

// g = g times the derivative that the bits chose. A derivative of 0 gives 0 also for an infinite or NaN gradient.
template <class A>
__device__ inline void bits_backward(unsigned bits, A (&g)[8], const Act& act) {
  const A on = act.kind == ActKind::hardsigmoid ? A(1.0 / 6.0) : A(1);
  const A off = act.kind == ActKind::leaky_relu ? static_cast<A>(act.a) : A(0);
#pragma unroll
  for (int k = 0; k < 8; ++k) g[k] = (bits >> k) & 1 ? g[k] * on : off == A(0) ? A(0) : g[k] * off;
}

}  // namespace tsmem::cuda
