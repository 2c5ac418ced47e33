// What the kernels of a norm are made of: statistics of a block's rows, what finishes sums over blocks, and what
// happens to an octet. Threads are told their place, so that the passes (norm.cu) and the kernel that keeps a map on
// chip (norm_persistent.cu) do the same work, to the bit.
#pragma once
#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/reduce.h"

namespace tsmem::cuda {

// --- Statistics
// The sums of a thread are about the mean of what it read first: close to its own mean, so that little cancels, and
// both stay exact enough in float for the few thousand elements that it has. Threads, blocks and parts merge by the law
// of total variance, in double.

struct Moments {
  double mean, m2;  // m2: sum of squared deviations
};

template <class A>
__device__ inline Moments moments_about(A shift, A sum, A squares, double count) {
  if (count == 0) return {0, 0};
  const double s = sum, q = squares;
  return {shift + s / count, q - s * s / count};
}

// partial[part, channel] = count, mean and squared deviations of a block's rows. keep(octet): what a thread read,
// row by row. at_once: of sum_over_rows().
template <class T, bool whole, int at_once, class Keep>
__device__ inline void stats_of_rows(const NormArgs& a, const Split& s, const Place& at, double* partial,
                                     const Keep& keep) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const RowsBlock b(a, s, at);
  A shift[8], sum[8], squares[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) shift[k] = sum[k] = squares[k] = 0;
  constexpr int batch = kBatch<T>;
  const int64_t step = at.high, r0 = b.r0 + at.y;
  const int64_t n = b.width > 0 && r0 < b.r1 ? (b.r1 - r0 + step - 1) / step : 0;
  for (int64_t i = 0; i < n; i += batch) {
    Octet<T> own[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (i + u < n) own[u] = read_octet<whole>(x + (r0 + (i + u) * step) * a.channels + b.c, false, 0, b.width);
    if (i == 0) {
      A base[8];
      numbers_in(own[0], base);
#pragma unroll
      for (int u = 1; u < batch; ++u) {
        if (u >= n) continue;
        A v[8];
        numbers_in(own[u], v);
#pragma unroll
        for (int k = 0; k < 8; ++k) shift[k] += v[k] - base[k];
      }
      const A part = A(1) / static_cast<A>(min(n, int64_t{batch}));
#pragma unroll
      for (int k = 0; k < 8; ++k) shift[k] = base[k] + part * shift[k];
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      if (i + u >= n) continue;
      keep(own[u]);
      A v[8];
      numbers_in(own[u], v);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const A d = v[k] - shift[k];
        sum[k] += d;
        squares[k] += d * d;
      }
    }
  }
  struct Means;
  auto& means = shared<Means, double[kThreads]>();
  const unsigned thread = at.thread();
  const auto own = static_cast<double>(n), rows = static_cast<double>(b.r1 - b.r0);
  double v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = own * moments_about(shift[k], sum[k], squares[k], own).mean;
  const double total = sum_over_rows<at_once>(v, at), mean = rows > 0 ? total / rows : 0;
  means[thread] = mean;  // of the block's channels, in the first threads
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Moments m = moments_about(shift[k], sum[k], squares[k], own);
    const double d = m.mean - means[8 * at.x + k];
    v[k] = n > 0 ? m.m2 + own * d * d : 0;
  }
  const double m2 = sum_over_rows<at_once>(v, at);
  const int64_t c = b.first + thread;
  if (c >= min(b.first + 8 * static_cast<int64_t>(at.wide), a.channels)) return;
  double* to = partial + 3 * (b.part * a.channels + c);
  to[0] = rows, to[1] = mean, to[2] = m2;
}

__device__ inline void set_output(void* to, bool f64, int64_t i, double value) {
  if (f64)
    static_cast<double*>(to)[i] = value;
  else
    static_cast<float*>(to)[i] = static_cast<float>(value);
}

// Blocks that add parts: kGroups channels side by side, kLanes threads for the parts of each.
constexpr unsigned kGroups = 4, kLanes = 64;
__host__ __device__ inline int64_t finish_blocks(int64_t n) { return (n + kGroups - 1) / kGroups; }

// The sums over at.y of each group's numbers, for the threads with at.y 0.
__device__ inline double sum_over_lanes(double v, const Place& at) {
  struct Lanes;
  auto& values = shared<Lanes, double[kLanes][kGroups]>();
  values[at.y][at.x] = v;
  __syncthreads();
  double sum = 0;
  if (at.y == 0)
    for (unsigned lane = 0; lane < kLanes; ++lane) sum += values[lane][at.x];
  __syncthreads();  // the next call writes to `values`
  return sum;
}

// Mean, inverse deviation and running statistics of a block's kGroups channels.
__device__ inline void finish_channels(const StatsArgs& a, const Place& at) {
  const int64_t c = at.block * kGroups + at.x;
  const bool here = c < a.channels;
  // About the first part's mean, for the same reason as the parts' own sums.
  const double about = here && a.parts > 0 ? a.partial[3 * c + 1] : 0;
  double count = 0, total = 0, m2 = 0;
  if (here) {
#pragma unroll 4
    for (int64_t p = at.y; p < a.parts; p += kLanes) {
      const double* part = a.partial + 3 * (p * a.channels + c);
      const double d = part[1] - about;
      count += part[0];
      total += part[0] * d;
      m2 += part[2] + part[0] * d * d;
    }
  }
  count = sum_over_lanes(count, at);
  total = sum_over_lanes(total, at);
  m2 = sum_over_lanes(m2, at);
  if (!here || at.y != 0) return;
  double mean = about + total / count;
  m2 = max(m2 - total * total / count, 0.0);
  double var;
  if (a.parts == 0) {
    mean = number(a.running_mean, c, 0.0);
    var = number(a.running_var, c, 1.0);
  } else {
    var = m2 / count;
    const double keep = 1 - a.momentum;
    if (a.running_mean.data) set_number(a.running_mean, c, a.momentum * mean + keep * number(a.running_mean, c, 0.0));
    if (a.running_var.data)  // the unbiased variance
      set_number(a.running_var, c, a.momentum * (m2 / (count - 1)) + keep * number(a.running_var, c, 0.0));
  }
  const bool flat = a.parts > 0 && var == 0 && a.eps == 0;
  set_output(a.mean, a.f64, c, mean);
  set_output(a.invstd, a.f64, c, flat ? 0 : 1 / sqrt(var + a.eps));
}

// --- Octets

// Eight bits from element e's on; hi > 0 of them are there.
__device__ inline unsigned bits_at(const uint8_t* mask, int64_t e, int hi) {
  const int shift = static_cast<int>(e % 8);
  unsigned bits = static_cast<unsigned>(mask[e / 8]) >> shift;
  if (shift + hi > 8) bits |= static_cast<unsigned>(mask[e / 8 + 1]) << (8 - shift);
  return bits;
}

// An octet's operands, as they lie in memory.
template <class T>
struct Operands {
  Octet<T> x, other, grad;
  unsigned bits;
};

// A one-bit activation of a sum has its mask in backward, and identity needs nothing.
template <class Row, bool backward>
constexpr bool needs_other = !backward || (!std::is_same_v<Row, acts::Identity> && !std::is_same_v<Row, acts::Relu>);

// Whether an activation may have a mask.
template <class Row>
constexpr bool may_have_bits = Row::saves == ActSaves::bit;
template <>
inline constexpr bool may_have_bits<AnyAct> = true;

// What is read beside x and the gradient.
template <class T, class Row, bool whole, bool backward>
__device__ inline void read_beside(const NormArgs& a, int64_t e, bool aligned, int lo, int hi, Operands<T>& read) {
  if (needs_other<Row, backward> && a.other)
    read.other = read_octet<whole>(static_cast<const T*>(a.other) + e, aligned, lo, hi);
  if (backward && may_have_bits<Row> && a.from_mask) read.bits = whole ? a.mask[e / 8] : bits_at(a.mask, e, hi);
}

template <class T, class Row, bool whole, bool backward>
__device__ inline void read_operands(const NormArgs& a, int64_t e, int lo, int hi, Operands<T>& read) {
  // Rows that are not whole octets begin anywhere, and the last octet may not be whole.
  const bool aligned = a.aligned && e % 8 == 0 && e + 8 <= a.numel;
  // In place others may be writing to what lies beside [lo, hi).
  const bool beside = aligned && ((lo == 0 && hi == 8) || a.grad_other != a.grad);
  if (backward) read.grad = read_octet<whole>(static_cast<const T*>(a.grad) + e, beside, lo, hi);
  if (!backward || a.x) read.x = read_octet<whole>(static_cast<const T*>(a.x) + e, aligned, lo, hi);
  read_beside<T, Row, whole, backward>(a, e, aligned, lo, hi, read);
}

template <bool with_other, class T, class A>
__device__ inline void pre_activation(const NormArgs& a, const Operands<T>& read, const Channel<A> (&ch)[8],
                                      const A (&x)[8], A (&pre)[8]) {
  affine(ch, x, pre);
  if (!with_other || !a.other) return;
  A other[8];
  numbers_in(read.other, other);
#pragma unroll
  for (int k = 0; k < 8; ++k) pre[k] += other[k];
}

// x and the gradient of the pre-activation of elements [lo, hi) of the eight from e on; elsewhere the mean, where no
// activation's derivative is NaN, and 0.
template <class T, class Row, bool whole, class A>
__device__ inline void grad_octet(const NormArgs& a, const Operands<T>& read, int64_t e, int lo, int hi,
                                  const Channel<A> (&ch)[8], A (&x)[8], A (&g)[8]) {
  numbers_in(read.grad, g);
  if (a.x) {
    numbers_in(read.x, x);
    if (!whole)
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (k < lo || k >= hi) x[k] = ch[k].mean;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = 0;
  }
  if (may_have_bits<Row> && a.from_mask) {
    bits_backward<Row>(read.bits, g, a.act);
  } else if (!std::is_same_v<Row, acts::Identity> && a.act.kind != ActKind::identity) {
    A pre[8];
    pre_activation<needs_other<Row, true>>(a, read, ch, x, pre);
    act_backward_octet<Row>(pre, g, a.act);
  }
  if (!whole)
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < lo || k >= hi) g[k] = 0;
  if (a.grad_other) store_octet(g, static_cast<T*>(a.grad_other) + e, whole || (a.aligned && e % 8 == 0), lo, hi);
}

// norm_grad (backward), or norm_apply, of the octet at e.
template <class T, class Row, bool whole, bool backward, class A>
__device__ inline void map_octet(const NormArgs& a, const Operands<T>& read, int64_t e, int hi,
                                 const Channel<A> (&ch)[8], const A (&tilt)[8], const A (&level)[8]) {
  A x[8], to[8];
  if constexpr (backward) {
    grad_octet<T, Row, whole>(a, read, e, 0, hi, ch, x, to);
    if (!a.out) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      to[k] *= ch[k].scale;
      if (a.tilt) to[k] -= fma_of(x[k] - ch[k].mean, tilt[k], level[k]);
    }
  } else {
    numbers_in(read.x, x);
    pre_activation<true>(a, read, ch, x, to);
    if (a.mask) a.mask[e / 8] = static_cast<uint8_t>(act_bits<Row>(to, a.act));
    act_octet<Row>(to, a.act);
  }
  store_octet(to, static_cast<T*>(a.out) + e, whole || a.aligned, 0, hi);
}

// Reads under way in a pass over maps; fewer where an activation is known at run time alone.
template <class T, class Row>
constexpr int kMapBatch = std::is_same_v<Row, AnyAct> ? (kBatch<T> + 1) / 2 : kBatch<T>;

// --- Sums

// What sums over a norm's operands read, where the activation is Row.
template <class Row>
struct ReadsOperands {
  template <class T>
  using Read = Operands<T>;
  template <class T>
  static constexpr int batch = kMapBatch<T, Row>;
  template <class T, bool whole>
  static __device__ void read(const NormArgs& a, int64_t e, int lo, int hi, Operands<T>& to) {
    read_operands<T, Row, whole, true>(a, e, lo, hi, to);
  }
};

// grad_pre, and grad_pre * (x - mean).
template <class Row>
struct NormSums : ReadsOperands<Row> {
  template <class T, bool whole, class A>
  static __device__ void values(const NormArgs& a, const Operands<T>& read, int64_t e, int lo, int hi,
                                const Channel<A> (&ch)[8], A (&g)[8], A (&dot)[8]) {
    A x[8];
    grad_octet<T, Row, whole>(a, read, e, lo, hi, ch, x, g);
#pragma unroll
    for (int k = 0; k < 8; ++k) dot[k] = a.x ? g[k] * (x[k] - ch[k].mean) : A(0);
  }
};

// The two sums of a group, for the threads with at.y 0; 0 where there is no such group.
__device__ inline void sum_parts(const double* partial, int64_t group, int64_t groups, int64_t parts, const Place& at,
                                 double& sum, double& dot) {
  sum = dot = 0;
  if (group < groups) {
#pragma unroll 4
    for (int64_t p = at.y; p < parts; p += kLanes) {
      sum += partial[2 * (p * groups + group)];
      dot += partial[2 * (p * groups + group) + 1];
    }
  }
  sum = sum_over_lanes(sum, at);
  dot = sum_over_lanes(dot, at);
}

// The gradients of the parameters, and tilt and level, of a block's kGroups channels.
__device__ inline void finish_channels(const SumsArgs& a, const Place& at) {
  const int64_t c = at.block * kGroups + at.x;
  double sum, dot;
  sum_parts(a.partial, c, a.channels, a.parts, at, sum, dot);
  if (c >= a.channels || at.y != 0) return;
  const double invstd = a.f64 ? static_cast<const double*>(a.invstd)[c] : static_cast<const float*>(a.invstd)[c];
  const double scale = invstd * number(a.weight, c, 1.0);
  dot *= invstd;
  if (a.grad_weight) set_output(a.grad_weight, a.f64, c, dot);
  if (a.grad_bias) set_output(a.grad_bias, a.f64, c, sum);
  if (a.tilt) {
    set_output(a.tilt, a.f64, c, scale * invstd * dot / a.count);
    set_output(a.level, a.f64, c, scale * sum / a.count);
  }
}

}  // namespace tsmem::cuda
