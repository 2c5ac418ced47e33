#include "cuda/norm.h"

#include <algorithm>
#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/reduce.h"

namespace tsmem::cuda {

namespace {

constexpr int64_t kBlocks = 2048;  // as many as fill the largest device, in a reduction; the same for all devices
constexpr int64_t kOctets = 4;     // of a thread in a reduction, at least, before its channel is split
constexpr int64_t kMostParts = 1024;
constexpr int64_t kRows = 8;  // of a thread, where it writes a map

int64_t up_to_power(int64_t n, int64_t most) {
  int64_t p = 1;
  while (p < n && p < most) p *= 2;
  return p;
}
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Split split(const NormArgs& a, int64_t segments) {
  Split s;
  s.segments = segments;
  const int64_t outer = a.outer / segments;
  if (a.planar()) {
    const int64_t octets = ceil_div(a.inner, 8) + 1,
                  threads = std::max<int64_t>(32, up_to_power(octets * outer, kThreads));
    s.block.x = static_cast<unsigned>(up_to_power(octets, threads));
    s.block.y = static_cast<unsigned>(threads / s.block.x);
    const int64_t groups = std::max<int64_t>(segments * a.channels, 1);
    const int64_t wanted =
        std::min({ceil_div(kBlocks, groups), ceil_div(outer * octets, threads * kOctets), kMostParts});
    s.over_outer = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(outer, 1));
    s.over_inner = std::clamp<int64_t>(wanted / s.over_outer, 1, octets);
  } else {
    const int64_t octets = ceil_div(a.channels, 8);
    s.block.x = static_cast<unsigned>(up_to_power(octets, 32));
    s.block.y = kThreads / s.block.x;
    const int64_t across = ceil_div(octets, s.block.x) * segments;
    s.over_outer = std::max<int64_t>(1, std::min({ceil_div(kBlocks, std::max<int64_t>(across, 1)),
                                                  ceil_div(outer, s.block.y * kOctets), kMostParts}));
  }
  return s;
}

namespace {

// --- Statistics
// The moments of a thread are taken about its own first element: close to its mean, so that little cancels, and both
// sums stay exact enough in float for the few thousand elements that it has. Threads, blocks and parts merge by the
// law of total variance, in double.

struct Moments {
  double count, mean, m2;
};

template <class A>
__device__ inline Moments moments_about(A shift, A sum, A squares, int64_t n) {
  if (n == 0) return {0, 0, 0};
  const double count = static_cast<double>(n), s = sum, q = squares;
  return {count, shift + s / count, q - s * s / count};
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) stats_planar(NormArgs a, Split s, double* partial) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const PlanarBlock b(a, s);
  A shift = 0, sum = 0, squares = 0;
  int64_t n = 0;
  planar_octets(a, s, b, [&](int64_t e, int lo, int hi) {
    if (n == 0) shift = to_compute(x[e + lo]);
    A v[8];
    load_octet(x + e, a.aligned, lo, hi, shift, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const A d = v[k] - shift;
      sum += d;
      squares += d * d;
    }
    n += hi - lo;
  });
  const Moments own = moments_about(shift, sum, squares, n);
  const double count = block_sum(own.count), total = block_sum(own.count * own.mean);
  const double mean = count > 0 ? total / count : 0, d = own.mean - mean;
  const double m2 = block_sum(own.count > 0 ? own.m2 + own.count * d * d : 0);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    double* to = partial + 3 * (b.group * s.parts() + b.part);
    to[0] = count, to[1] = mean, to[2] = m2;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) stats_rows(NormArgs a, Split s, double* partial) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const RowsBlock b(a, s);
  const bool aligned = a.aligned && a.channels % 8 == 0;
  A shift[8], sum[8], squares[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) shift[k] = sum[k] = squares[k] = 0;
  int64_t n = 0;
  if (b.width > 0) {
    int64_t r = b.r0 + threadIdx.y;
    if (r < b.r1) {
      load_octet(x + r * a.channels + b.c, aligned, 0, b.width, A(0), shift);
      n = (b.r1 - r + blockDim.y - 1) / blockDim.y;
    }
#pragma unroll 4
    for (; r < b.r1; r += blockDim.y) {
      A v[8];
      load_octet(x + r * a.channels + b.c, aligned, 0, b.width, A(0), v);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const A d = v[k] - shift[k];
        sum[k] += d;
        squares[k] += d * d;
      }
    }
  }
  double mean[8], total[8], m2[8];
  const double rows = static_cast<double>(b.r1 - b.r0);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Moments own = moments_about(shift[k], sum[k], squares[k], n);
    mean[k] = own.mean, m2[k] = own.m2;
    total[k] = own.count * own.mean;
  }
  sum_over_y(total);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    total[k] = rows > 0 ? total[k] / rows : 0;
    const double d = mean[k] - total[k];
    m2[k] = n > 0 ? m2[k] + static_cast<double>(n) * d * d : 0;
  }
  sum_over_y(m2);
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < b.width) {
      double* to = partial + 3 * ((b.c + k) * s.over_outer + b.part);
      to[0] = rows, to[1] = total[k], to[2] = m2[k];
    }
}

__device__ inline void set_output(void* to, bool f64, int64_t i, double value) {
  if (f64)
    static_cast<double*>(to)[i] = value;
  else
    static_cast<float*>(to)[i] = static_cast<float>(value);
}

// A warp for each channel.
__global__ void __launch_bounds__(kThreads, 2) finish_stats(StatsArgs a) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool here = c < a.channels;  // the whole warp
  double count = 0, total = 0, m2 = 0;
  const double* from = a.partial + 3 * c * a.parts;
  if (here)
    for (int64_t p = threadIdx.x; p < a.parts; p += 32) count += from[3 * p], total += from[3 * p] * from[3 * p + 1];
  count = warp_sum(count);
  total = warp_sum(total);
  double mean = total / count;
  if (here)
    for (int64_t p = threadIdx.x; p < a.parts; p += 32) {
      const double d = from[3 * p + 1] - mean;
      m2 += from[3 * p + 2] + from[3 * p] * d * d;
    }
  m2 = warp_sum(m2);
  if (!here || threadIdx.x != 0) return;
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

// --- Maps

// The channels' coefficients of elements [e, e + hi).
template <class A>
__device__ inline void flat_channels(const NormArgs& a, int64_t e, int hi, Channel<A> (&ch)[8], int64_t (&index)[8]) {
  int64_t i = e, plane = a.by_inner.split(i), c = plane;
  a.by_channels.split(c);
  Channel<A> now = channel<A>(a, c);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    ch[k] = now;
    index[k] = c;
    if (++i == a.inner && k + 1 < hi) {
      i = 0;
      c = c + 1 == a.channels ? 0 : c + 1;
      now = channel<A>(a, c);
    }
  }
}

// Eight bits from element e's on; hi > 0 of them are there.
__device__ inline unsigned bits_at(const uint8_t* mask, int64_t e, int hi) {
  const int shift = static_cast<int>(e % 8);
  unsigned bits = static_cast<unsigned>(mask[e / 8]) >> shift;
  if (shift + hi > 8) bits |= static_cast<unsigned>(mask[e / 8 + 1]) << (8 - shift);
  return bits;
}

template <class T, class A>
__device__ inline void apply_octet(const NormArgs& a, int64_t e, int hi, const Channel<A> (&ch)[8]) {
  A x[8], pre[8];
  load_octet(static_cast<const T*>(a.x) + e, a.aligned, 0, hi, A(0), x);
  affine(ch, x, pre);
  if (a.other) {
    A other[8];
    load_octet(static_cast<const T*>(a.other) + e, a.aligned, 0, hi, A(0), other);
#pragma unroll
    for (int k = 0; k < 8; ++k) pre[k] += other[k];
  }
  if (a.mask) a.mask[e / 8] = static_cast<uint8_t>(act_bits(pre, a.act));
  act_octet(pre, a.act);
  store_octet(pre, static_cast<T*>(a.out) + e, a.aligned, 0, hi);
}

// x and the gradient of the pre-activation of elements [lo, hi) of the eight from e on; elsewhere the mean, where no
// activation's derivative is NaN, and 0.
template <class T, class A>
__device__ inline void grad_octet(const NormArgs& a, int64_t e, int lo, int hi, bool aligned, const Channel<A> (&ch)[8],
                                  A (&x)[8], A (&g)[8]) {
  load_octet(static_cast<const T*>(a.grad) + e, aligned, lo, hi, A(0), g);
  if (a.x) {
    load_octet(static_cast<const T*>(a.x) + e, aligned, lo, hi, A(0), x);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < lo || k >= hi) x[k] = ch[k].mean;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = 0;
  }
  if (a.from_mask) {
    bits_backward(bits_at(a.mask, e, hi), g, a.act);
  } else if (a.act.kind != ActKind::identity) {
    A pre[8];
    affine(ch, x, pre);
    if (a.other) {
      A other[8];
      load_octet(static_cast<const T*>(a.other) + e, aligned, lo, hi, A(0), other);
#pragma unroll
      for (int k = 0; k < 8; ++k) pre[k] += other[k];
    }
    act_backward_octet(pre, g, a.act);
  }
  if (a.grad_other) store_octet(g, static_cast<T*>(a.grad_other) + e, aligned, lo, hi);
}

template <class T, class A>
__device__ inline void input_grad_octet(const NormArgs& a, int64_t e, int hi, const Channel<A> (&ch)[8],
                                        const A (&tilt)[8], const A (&level)[8]) {
  A x[8], g[8];
  grad_octet<T>(a, e, 0, hi, a.aligned, ch, x, g);
  if (!a.out) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    g[k] *= ch[k].scale;
    if (a.tilt) g[k] -= fma_of(x[k] - ch[k].mean, tilt[k], level[k]);
  }
  store_octet(g, static_cast<T*>(a.out) + e, a.aligned, 0, hi);
}

// One octet a thread, for planar maps and rows whose octets are of several rows; backward: norm_grad, else norm_apply.
template <class T, bool backward>
__global__ void __launch_bounds__(kThreads, 3) map_flat(NormArgs a) {
  using A = compute_t<T>;
  const int64_t e = 8 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (e >= a.numel) return;
  const int hi = static_cast<int>(min(a.numel - e, int64_t{8}));
  Channel<A> ch[8];
  int64_t index[8];
  flat_channels(a, e, hi, ch, index);
  if constexpr (backward) {
    A tilt[8], level[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      tilt[k] = a.tilt ? static_cast<const A*>(a.tilt)[index[k]] : A(0);
      level[k] = a.tilt ? static_cast<const A*>(a.level)[index[k]] : A(0);
    }
    input_grad_octet<T>(a, e, hi, ch, tilt, level);
  } else {
    apply_octet<T>(a, e, hi, ch);
  }
}

// Rows of whole octets: a thread stays with its eight channels for kRows rows.
template <class T, bool backward>
__global__ void __launch_bounds__(kThreads, 3) map_rows(NormArgs a) {
  using A = compute_t<T>;
  const int64_t octets = a.channels / 8, across = (octets + blockDim.x - 1) / blockDim.x;
  const int64_t octet = static_cast<int64_t>(blockIdx.x % across) * blockDim.x + threadIdx.x, c = 8 * octet;
  if (octet >= octets) return;
  const int64_t r0 = blockIdx.x / across * blockDim.y * kRows + threadIdx.y;
  const int64_t r1 = min(r0 + blockDim.y * kRows, a.outer);
  Channel<A> ch[8];
  A tilt[8], level[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    ch[k] = channel<A>(a, c + k);
    if (backward) {
      tilt[k] = a.tilt ? static_cast<const A*>(a.tilt)[c + k] : A(0);
      level[k] = a.tilt ? static_cast<const A*>(a.level)[c + k] : A(0);
    }
  }
  for (int64_t r = r0; r < r1; r += blockDim.y) {
    if constexpr (backward)
      input_grad_octet<T>(a, r * a.channels + c, 8, ch, tilt, level);
    else
      apply_octet<T>(a, r * a.channels + c, 8, ch);
  }
}

template <bool backward>
void map(const char* name, const NormArgs& a, Stream stream) {
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (!a.planar() && a.channels % 8 == 0) {
      const int64_t octets = a.channels / 8, x = up_to_power(octets, 32), y = kThreads / x;
      const Block block{static_cast<unsigned>(x), static_cast<unsigned>(y)};
      launch(name, map_rows<T, backward>, ceil_div(octets, x) * ceil_div(a.outer, y * kRows), block, stream, a);
    } else {
      launch(name, map_flat<T, backward>, ceil_div(a.numel, 8 * kThreads), Block{kThreads}, stream, a);
    }
  });
}

// --- Sums

// grad_pre, and grad_pre * (x - mean).
struct NormSums {
  template <class T, class A>
  static __device__ void values(const NormArgs& a, int64_t e, int lo, int hi, bool aligned, const Channel<A> (&ch)[8],
                                A (&g)[8], A (&dot)[8]) {
    A x[8];
    grad_octet<T>(a, e, lo, hi, aligned, ch, x, g);
#pragma unroll
    for (int k = 0; k < 8; ++k) dot[k] = a.x ? g[k] * (x[k] - ch[k].mean) : A(0);
  }
};

// grad * act(pre)
struct ScaleSums {
  template <class T, class A>
  static __device__ void values(const NormArgs& a, int64_t e, int lo, int hi, bool aligned, const Channel<A> (&ch)[8],
                                A (&g)[8], A (&none)[8]) {
    A x[8], y[8];
    load_octet(static_cast<const T*>(a.grad) + e, aligned, lo, hi, A(0), g);
    load_octet(static_cast<const T*>(a.x) + e, aligned, lo, hi, A(0), x);
    affine(ch, x, y);
    act_octet(y, a.act);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      g[k] = k >= lo && k < hi ? g[k] * y[k] : A(0);
      none[k] = 0;
    }
  }
};

// The two sums of a group, for all threads of its warp; 0 where there is no such group.
__device__ inline void sum_parts(const double* partial, int64_t group, int64_t groups, int64_t parts, double& sum,
                                 double& dot) {
  sum = dot = 0;
  const double* from = partial + 2 * group * parts;
  if (group < groups)
    for (int64_t p = threadIdx.x; p < parts; p += 32) sum += from[2 * p], dot += from[2 * p + 1];
  sum = warp_sum(sum);
  dot = warp_sum(dot);
}

__global__ void __launch_bounds__(kThreads, 2) finish_sums(SumsArgs a) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  double sum, dot;
  sum_parts(a.partial, c, a.channels, a.parts, sum, dot);
  if (c >= a.channels || threadIdx.x != 0) return;
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

__global__ void __launch_bounds__(kThreads, 2)
    finish_scale_grad(const double* partial, int64_t groups, int64_t parts, bool f64, void* out) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  double sum, none;
  sum_parts(partial, group, groups, parts, sum, none);
  if (group < groups && threadIdx.x == 0) set_output(out, f64, group, sum);
}

constexpr Block kWarps{32, 8};
int64_t warp_blocks(int64_t n) { return ceil_div(n, kWarps.y); }

}  // namespace

void norm_stats(const NormArgs& a, const Split& s, double* partial, Stream stream) {
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (a.planar())
      launch("stats_planar", stats_planar<T>, planar_blocks(a, s), s.block, stream, a, s, partial);
    else
      launch("stats_rows", stats_rows<T>, rows_blocks(a, s), s.block, stream, a, s, partial);
  });
}

void norm_finish_stats(const StatsArgs& a, Stream stream) {
  launch("finish_stats", finish_stats, warp_blocks(a.channels), kWarps, stream, a);
}

void norm_apply(const NormArgs& a, Stream stream) { map<false>("norm_apply", a, stream); }
void norm_grad(const NormArgs& a, Stream stream) { map<true>("norm_grad", a, stream); }

void norm_reduce(const NormArgs& a, const Split& s, double* partial, Stream stream) {
  reduce<NormSums>("norm_reduce", a, s, partial, stream);
}

void norm_finish_sums(const SumsArgs& a, Stream stream) {
  launch("finish_sums", finish_sums, warp_blocks(a.channels), kWarps, stream, a);
}

void norm_scale_grad(const NormArgs& a, const Split& s, double* partial, void* out, Stream stream) {
  reduce<ScaleSums>("norm_scale_grad", a, s, partial, stream);
  const int64_t groups = s.segments * a.channels;
  launch("finish_scale_grad", finish_scale_grad, warp_blocks(groups), kWarps, stream, partial, groups, s.parts(),
         a.dtype == Dtype::f64, out);
}

}  // namespace tsmem::cuda
