// What the normalisation kernels share: walking a feature map in chunks, the affine map, the gradient before the
// activation.
#pragma once
#include <cstring>
#include <type_traits>

#include "cpu/act_math.h"
#include "cpu/chunk.h"
#include "cpu/norm.h"

namespace tsmem::TSMEM_ISA {
namespace {

constexpr int64_t kChunk = 1024;        // elements in L1 at a time
constexpr int64_t kRowsPerFlush = 128;  // rows that are summed in float before their sum goes to double

// Vectors of the machine's own width: of wider ones the compiler takes comparisons apart, element by element.
#if defined(__AVX512F__)
constexpr int64_t kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVecBytes = 32;
#else
constexpr int64_t kVecBytes = 16;
#endif

// Sums of many floats: in lanes, so that rounding errors grow with the square root of n / lanes.
template <class A>
struct Lanes {
  typedef A V __attribute__((vector_size(kVecBytes)));
  static constexpr int64_t width = kVecBytes / sizeof(A);
};

template <class A>
inline double total(const typename Lanes<A>::V& v) {
  double sums[Lanes<A>::width];
  for (int64_t i = 0; i < Lanes<A>::width; ++i) sums[i] = v[i];
  for (int64_t half = Lanes<A>::width / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// The last vector of n >= width elements, which overlaps the one before: lanes below `skip` were taken already.
template <class A>
inline int64_t overlap(int64_t i, int64_t n) {
  return Lanes<A>::width - (n - i);
}
template <class A>
inline void drop_first(typename Lanes<A>::V& v, int64_t skip) {
  using I = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef I Index __attribute__((vector_size(kVecBytes)));
  Index lane;
  for (int64_t i = 0; i < Lanes<A>::width; ++i) lane[i] = static_cast<I>(i);
  v = lane >= static_cast<I>(skip) ? v : typename Lanes<A>::V{};
}

// sum of x - shift and of (x - shift)^2
template <class A>
inline void moments(const A* __restrict x, int64_t n, A shift, double* sum, double* squares) {
  using V = typename Lanes<A>::V;
  constexpr int64_t w = Lanes<A>::width;
  V s0 = {}, s1 = {}, q0 = {}, q1 = {};
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    V d0, d1;
    std::memcpy(&d0, x + i, sizeof(V));
    std::memcpy(&d1, x + i + w, sizeof(V));
    d0 -= shift, d1 -= shift;
    s0 += d0, s1 += d1;
    q0 += d0 * d0, q1 += d1 * d1;
  }
  for (; i < n && n >= w; i += w) {
    const bool last = i + w > n;
    V d;
    std::memcpy(&d, x + (last ? n - w : i), sizeof(V));
    d -= shift;
    if (last) drop_first<A>(d, overlap<A>(i, n));
    s0 += d;
    q0 += d * d;
  }
  double s = total<A>(s0 + s1), q = total<A>(q0 + q1);
  for (; i < n; ++i) {
    const A d = x[i] - shift;
    s += d;
    q += static_cast<double>(d * d);
  }
  *sum = s;
  *squares = q;
}

// sum of g and of g * (x - mean)
template <class A>
inline void dots(const A* __restrict g, const A* __restrict x, int64_t n, A mean, double* sum, double* dot) {
  using V = typename Lanes<A>::V;
  constexpr int64_t w = Lanes<A>::width;
  V s0 = {}, s1 = {}, q0 = {}, q1 = {};
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    V d0, d1, g0, g1;
    std::memcpy(&d0, x + i, sizeof(V));
    std::memcpy(&d1, x + i + w, sizeof(V));
    std::memcpy(&g0, g + i, sizeof(V));
    std::memcpy(&g1, g + i + w, sizeof(V));
    s0 += g0, s1 += g1;
    q0 += g0 * (d0 - mean), q1 += g1 * (d1 - mean);
  }
  double s = total<A>(s0 + s1), q = total<A>(q0 + q1);
  for (; i < n; ++i) {
    s += g[i];
    q += static_cast<double>(g[i] * (x[i] - mean));
  }
  *sum += s;
  *dot += q;
}

// sum of g, or with x of g * x
template <class A>
inline double product(const A* __restrict g, const A* __restrict x, int64_t n) {
  using V = typename Lanes<A>::V;
  constexpr int64_t w = Lanes<A>::width;
  V q0 = {}, q1 = {};
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    V g0, g1;
    std::memcpy(&g0, g + i, sizeof(V));
    std::memcpy(&g1, g + i + w, sizeof(V));
    if (x) {
      V x0, x1;
      std::memcpy(&x0, x + i, sizeof(V));
      std::memcpy(&x1, x + i + w, sizeof(V));
      g0 *= x0, g1 *= x1;
    }
    q0 += g0, q1 += g1;
  }
  double q = total<A>(q0 + q1);
  for (; i < n; ++i) q += static_cast<double>(x ? g[i] * x[i] : g[i]);
  return q;
}

// Chan's rule: the mean and M2 of n values and of m more, given those of both.
inline void merge(double n, double* mean, double* m2, double m, double mean_b, double m2_b) {
  const double delta = mean_b - *mean, share = m / (n + m);
  *mean += delta * share;
  *m2 += m2_b + delta * delta * n * share;
}

// A run of memory that is processed at once: `rows` rows (of `length` elements) of consecutive channels, or with rows
// layout one stretch whose elements have the coefficients q, q + 1, ...
struct Chunk {
  int64_t offset, n;  // in elements
  int64_t index;      // c - c0 of the first row; coefficient index with rows
  int64_t rows, length;
  int64_t mask;         // byte offset of the first row's bits
  int64_t mask_stride;  // bytes from one row's bits to the next
  int64_t row;          // o - o0 (planar)
};

template <class F>
inline void planar_chunks(const NormArgs& a, NormRange r, F f) {
  const int64_t mask_stride = (a.inner + 7) / 8;
  for (int64_t o = r.o0; o < r.o1; ++o) {
    const int64_t row = o * a.channels;
    if (a.inner <= kChunk / 2) {
      const int64_t step = kChunk / a.inner;
      for (int64_t c = r.c0; c < r.c1; c += step) {
        const int64_t rows = c + step < r.c1 ? step : r.c1 - c;
        f(Chunk{(row + c) * a.inner, rows * a.inner, c - r.c0, rows, a.inner, (row + c) * mask_stride, mask_stride,
                o - r.o0});
      }
    } else {
      for (int64_t c = r.c0; c < r.c1; ++c)
        for (int64_t i = 0; i < a.inner; i += kChunk) {
          const int64_t n = i + kChunk < a.inner ? kChunk : a.inner - i;
          f(Chunk{(row + c) * a.inner + i, n, c - r.c0, 1, n, (row + c) * mask_stride + i / 8, mask_stride, o - r.o0});
        }
    }
  }
}

// Stretches of at most kChunk elements (a multiple of 8 but for the last) that do not cross a multiple of the period,
// from element `begin` (where a period starts) to the end of the range.
template <class F>
inline void row_chunks(const NormArgs& a, NormRange r, int64_t begin, F f) {
  const int64_t end = r.o1 * a.channels;
  for (int64_t base = begin; base < end; base += a.period)
    for (int64_t q = 0; q < a.period && base + q < end; q += kChunk) {
      int64_t n = a.period - q < kChunk ? a.period - q : kChunk;
      if (base + q + n > end) n = end - base - q;
      f(Chunk{base + q, n, q, 1, n, (base + q) / 8, 0, 0});
    }
}

template <class F>
inline void chunks(const NormArgs& a, NormRange r, int64_t begin, F f) {
  if (a.planar())
    planar_chunks(a, r, f);
  else
    row_chunks(a, r, begin, f);
}

// out = (x - mean) * scale + bias
template <class A>
inline void affine(const NormArgs& a, NormRange r, const Chunk& k, const A* x, A* out, bool rows) {
  const A *mean = static_cast<const A*>(a.mean), *scale = static_cast<const A*>(a.scale),
          *bias = static_cast<const A*>(a.bias);
  if (!rows) {
    for (int64_t j = 0; j < k.rows; ++j) {
      const int64_t c = r.c0 + k.index + j;
      const A m = mean[c], s = scale[c], b = bias[c], *from = x + j * k.length;
      A* to = out + j * k.length;
#pragma GCC ivdep
      for (int64_t i = 0; i < k.length; ++i) to[i] = (from[i] - m) * s + b;
    }
  } else {
    const A *m = mean + k.index, *s = scale + k.index, *b = bias + k.index;
#pragma GCC ivdep
    for (int64_t i = 0; i < k.n; ++i) out[i] = (x[i] - m[i]) * s[i] + b[i];
  }
}

// out = g * slope - ((x - mean) * tilt + level), or g * slope without tilt
template <class A>
inline void input_grad(const NormArgs& a, NormRange r, const Chunk& k, const A* x, const A* g, A* to, bool rows) {
  const A *mean = static_cast<const A*>(a.mean), *slope = static_cast<const A*>(a.slope),
          *tilt = static_cast<const A*>(a.tilt), *level = static_cast<const A*>(a.level);
  if (!rows) {
    for (int64_t j = 0; j < k.rows; ++j) {
      const int64_t c = r.c0 + k.index + j, base = j * k.length;
      const A sl = slope[c];
      if (tilt) {
        const A m = mean[c], ti = tilt[c], le = level[c];
#pragma GCC ivdep
        for (int64_t i = base; i < base + k.length; ++i) to[i] = g[i] * sl - ((x[i] - m) * ti + le);
      } else {
#pragma GCC ivdep
        for (int64_t i = base; i < base + k.length; ++i) to[i] = g[i] * sl;
      }
    }
    return;
  }
  const A* sl = slope + k.index;
  if (tilt) {
    const A *m = mean + k.index, *ti = tilt + k.index, *le = level + k.index;
#pragma GCC ivdep
    for (int64_t i = 0; i < k.n; ++i) to[i] = g[i] * sl[i] - ((x[i] - m[i]) * ti[i] + le[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < k.n; ++i) to[i] = g[i] * sl[i];
  }
}

// Buffers of one call, in L1. Flags have room for a whole last byte.
template <class A>
struct Buffers {
  alignas(64) A x[kChunk], g[kChunk], pre[kChunk];
  alignas(64) uint8_t flags[kChunk + 8];
};

// The gradient of the pre-activation of a chunk. `x` is the chunk's input, or null where it is not needed.
template <class T, class A>
inline const A* grad_pre(const NormArgs& a, NormRange r, const Chunk& k, const A* x, Buffers<A>& b) {
  const A* g = load(static_cast<const T*>(a.grad) + k.offset, b.g, k.n);
  if (a.from_mask) {
    for (int64_t j = 0; j < k.rows; ++j) {
      unpack_bits(a.mask + k.mask + j * k.mask_stride, b.flags, k.length);
      flags_backward(b.flags, g + j * k.length, b.g + j * k.length, k.length, a.act);
    }
    return b.g;
  }
  if (a.act.kind == ActKind::identity) return g;
  affine(a, r, k, x, b.pre, !a.planar());
  if (a.other) {
    A* sum = b.pre;
    // b.g is free for `other` where the gradient itself needed no conversion.
    alignas(64) A buffer[kChunk];
    const A* other = load(static_cast<const T*>(a.other) + k.offset, buffer, k.n);
#pragma GCC ivdep
    for (int64_t i = 0; i < k.n; ++i) sum[i] += other[i];
  }
  act_backward(b.pre, g, b.g, k.n, a.act);
  return b.g;
}

}  // namespace
}  // namespace tsmem::TSMEM_ISA
