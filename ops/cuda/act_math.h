// Activations and their derivatives on the device. The formulas are those of act_table.h; the elementary
// functions are CUDA's own, which are as accurate as PyTorch's.
#pragma once
#include <cmath>
#include <type_traits>

#include "act_table.h"
#include "cuda/launch.h"

namespace tsmem::cuda {

struct Math {
  static __device__ inline float exp_of(float x) { return expf(x); }
  static __device__ inline double exp_of(double x) { return exp(x); }
  static __device__ inline float expm1_of(float x) { return expm1f(x); }
  static __device__ inline double expm1_of(double x) { return expm1(x); }
  static __device__ inline float log1p_of(float x) { return log1pf(x); }
  static __device__ inline double log1p_of(double x) { return log1p(x); }
  static __device__ inline float tanh_of(float x) { return tanhf(x); }
  static __device__ inline double tanh_of(double x) { return tanh(x); }
  template <class A>
  static __device__ inline A sigmoid_of(A x) {
    return A(1) / (A(1) + exp_of(-x));
  }
  template <class A>
  static __device__ inline A gauss_of(A x) {
    return exp_of(A(-0.5) * x * x);
  }
  // x / 6 as ATen's kernels have it: times a constant that is a float32 for float64 too. Emulated, the CPU's.
#ifdef TSMEM_EMULATE_CUDA
  template <class A>
  static inline A sixth_of(A x) {
    return x / A(6);
  }
#else
  template <class A>
  static __device__ inline A sixth_of(A x) {
    return x * A(1.0f / 6.0f);
  }
#endif
  // The normal distribution function, accurate in its lower tail too.
  static __device__ inline float phi_of(float x, float) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
  static __device__ inline double phi_of(double x, double) { return 0.5 * erfc(-x * 0.70710678118654752440); }
  // A zero keeps its sign.
  template <class A>
  static __device__ inline A relu_of(A x) {
    return x < A(0) ? A(0) : x;
  }
};

// Never left to the compiler's choice: forward and backward must round alike where they decide the same bit.
__device__ inline float fma_of(float x, float y, float z) { return fmaf(x, y, z); }
__device__ inline double fma_of(double x, double y, double z) { return fma(x, y, z); }

// The kernels are compiled for the commonest activations and for one that is known at run time alone, whose branches
// cost registers.
struct AnyAct {};
template <class F>
void with_common_act(ActKind kind, const F& f) {
  if (kind == ActKind::identity)
    f(acts::Identity{});
  else if (kind == ActKind::relu)
    f(acts::Relu{});
  else if (kind == ActKind::silu)
    f(acts::Silu{});
  else
    f(AnyAct{});
}

// f(row): Act's own, or the one that act's kind names: the same for all threads, one branch an octet.
template <class Row, class F>
__device__ inline void with_row_of(const Act& act, const F& f) {
  if constexpr (std::is_same_v<Row, AnyAct>)
    with_row(act.kind, f);
  else
    f(Row{});
}

// x = act(x) for eight elements.
template <class Row = AnyAct, class A>
__device__ inline void act_octet(A (&x)[8], const Act& act) {
  with_row_of<Row>(act, [&](auto row) {
    using This = decltype(row);
    if constexpr (This::kind != ActKind::identity) {
      const ActNumbers<A> p = numbers_of<A>(act);
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = This::template forward<Math>(x[k], p);
    }
  });
}

// g = g * act'(x) for eight elements.
template <class Row = AnyAct, class A>
__device__ inline void act_backward_octet(const A (&x)[8], A (&g)[8], const Act& act) {
  with_row_of<Row>(act, [&](auto row) {
    const ActNumbers<A> p = numbers_of<A>(act);
#pragma unroll
    for (int k = 0; k < 8; ++k) g[k] = act_gradient<decltype(row), Math>(x[k], g[k], p);
  });
}

// Bit k: which of a one_bit activation's two derivatives holds at x[k].
template <class Row = AnyAct, class A>
__device__ inline unsigned act_bits(const A (&x)[8], const Act& act) {
  unsigned bits = 0;
  with_row_of<Row>(act, [&](auto row) {
    using This = decltype(row);
    if constexpr (This::saves == ActSaves::bit) {
      const ActNumbers<A> p = numbers_of<A>(act);
#pragma unroll
      for (int k = 0; k < 8; ++k) bits |= (This::upper(x[k], p) ? 1u : 0u) << k;
    }
  });
  return bits;
}

// g = g times the derivative that the bits chose. A derivative of 0 gives 0 also for an infinite or NaN gradient.
template <class Row = AnyAct, class A>
__device__ inline void bits_backward(unsigned bits, A (&g)[8], const Act& act) {
  Slopes s;
  with_row_of<Row>(act, [&](auto row) { s = slopes_of<decltype(row)>(act); });
  const A on = static_cast<A>(s.on), off = static_cast<A>(s.off);
#pragma unroll
  for (int k = 0; k < 8; ++k) g[k] = (bits >> k) & 1 ? g[k] * on : off == A(0) ? A(0) : g[k] * off;
}

}  // namespace tsmem::cuda
