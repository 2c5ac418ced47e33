#include "cuda/norm.h"

#include <algorithm>
#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/reduce.h"

namespace tsmem::cuda {

namespace {

// Blocks of a reduction, and of a pass over rows: some for each multiprocessor of the largest devices; the same for all
// devices, so that sums do not depend on the device.
constexpr int64_t kBlocks = 528;
constexpr int64_t kOctets = 8;  // of a thread in a reduction, at least, before its channel is split

int64_t up_to_power(int64_t n, int64_t most) {
  int64_t p = 1;
  while (p < n && p < most) p *= 2;
  return p;
}
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads beside each other have neighbouring octets of channels, at most 32; so few as idle have none.
Block rows_block(int64_t channels) {
  const int64_t octets = ceil_div(channels, 8), x = ceil_div(octets, ceil_div(octets, 32));
  return {static_cast<unsigned>(x), static_cast<unsigned>(kThreads / x)};
}

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
    const int64_t wanted = std::min(ceil_div(kBlocks, groups), ceil_div(outer * octets, threads * kOctets));
    s.over_outer = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(outer, 1));
    s.over_inner = std::clamp<int64_t>(wanted / s.over_outer, 1, octets);
    s.fits = outer * octets <= UINT32_MAX;
  } else {
    s.block = rows_block(a.channels);
    const int64_t octets = ceil_div(a.channels, 8);
    const int64_t across = ceil_div(octets, s.block.x) * segments;
    s.over_outer = std::max<int64_t>(
        1, std::min(ceil_div(kBlocks, std::max<int64_t>(across, 1)), ceil_div(outer, s.block.y * kOctets)));
  }
  return s;
}

namespace {

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

template <class T, bool whole>
__global__ void __launch_bounds__(kThreads, 2) stats_planar(NormArgs a, Split s, double* partial) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const PlanarBlock b(a, s);
  A shift = 0, sum = 0, squares = 0;
  int64_t n = 0;
  constexpr int batch = kBatch<T>;
  planar_octets<batch, whole>(a, s, b, [&](const Octets<batch>& at) {
    Octet<T> own[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (at.hi[u] > 0)
        own[u] = read_octet<whole>(x + at.e[u], a.aligned && at.e[u] + 8 <= a.numel, at.lo[u], at.hi[u]);
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      if (at.hi[u] <= at.lo[u]) continue;
      A v[8];
      numbers_in(own[u], v);
      if (n == 0) {
        A base = v[0], rest = 0;
        for (int k = 1; k < 8; ++k) base = k == at.lo[u] ? v[k] : base;
        for (int k = 0; k < 8; ++k) rest += k >= at.lo[u] && k < at.hi[u] ? v[k] - base : A(0);
        shift = base + rest / static_cast<A>(at.hi[u] - at.lo[u]);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const A d = whole || (k >= at.lo[u] && k < at.hi[u]) ? v[k] - shift : A(0);
        sum += d;
        squares += d * d;
      }
      n += at.hi[u] - at.lo[u];
    }
  });
  const auto own = static_cast<double>(n);
  const Moments m = moments_about(shift, sum, squares, own);
  const double count = block_sum(own), total = block_sum(own * m.mean);
  const double mean = count > 0 ? total / count : 0, d = m.mean - mean;
  const double m2 = block_sum(n > 0 ? m.m2 + own * d * d : 0);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    double* to = partial + 3 * (b.part * s.segments * a.channels + b.group);
    to[0] = count, to[1] = mean, to[2] = m2;
  }
}

template <class T, bool whole>
__global__ void __launch_bounds__(kThreads, 3) stats_rows(NormArgs a, Split s, double* partial) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const RowsBlock b(a, s);
  A shift[8], sum[8], squares[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) shift[k] = sum[k] = squares[k] = 0;
  constexpr int batch = kBatch<T>;
  const int64_t step = blockDim.y, r0 = b.r0 + threadIdx.y;
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
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const auto own = static_cast<double>(n), rows = static_cast<double>(b.r1 - b.r0);
  double v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = own * moments_about(shift[k], sum[k], squares[k], own).mean;
  const double total = sum_over_rows(v), mean = rows > 0 ? total / rows : 0;
  means[thread] = mean;  // of the block's channels, in the first threads
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Moments m = moments_about(shift[k], sum[k], squares[k], own);
    const double d = m.mean - means[8 * threadIdx.x + k];
    v[k] = n > 0 ? m.m2 + own * d * d : 0;
  }
  const double m2 = sum_over_rows(v);
  const int64_t c = b.first + thread;
  if (c >= min(b.first + 8 * static_cast<int64_t>(blockDim.x), a.channels)) return;
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

// The sums over threadIdx.y of each group's numbers, for the threads with threadIdx.y 0.
__device__ inline double sum_over_lanes(double v) {
  struct Lanes;
  auto& values = shared<Lanes, double[kLanes][kGroups]>();
  values[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  double sum = 0;
  if (threadIdx.y == 0)
    for (unsigned lane = 0; lane < kLanes; ++lane) sum += values[lane][threadIdx.x];
  __syncthreads();  // the next call writes to `values`
  return sum;
}

__global__ void __launch_bounds__(kThreads, 2) finish_stats(StatsArgs a) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x;
  const bool here = c < a.channels;
  // About the first part's mean, for the same reason as the parts' own sums.
  const double about = here && a.parts > 0 ? a.partial[3 * c + 1] : 0;
  double count = 0, total = 0, m2 = 0;
  if (here) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < a.parts; p += kLanes) {
      const double* part = a.partial + 3 * (p * a.channels + c);
      const double d = part[1] - about;
      count += part[0];
      total += part[0] * d;
      m2 += part[2] + part[0] * d * d;
    }
  }
  count = sum_over_lanes(count);
  total = sum_over_lanes(total);
  m2 = sum_over_lanes(m2);
  if (!here || threadIdx.y != 0) return;
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

// An octet's operands, as they lie in memory.
template <class T>
struct Operands {
  Octet<T> x, other, grad;
  unsigned bits;
};

// A one-bit activation of a sum has its mask in backward, and identity needs nothing.
template <class Row, bool backward>
constexpr bool needs_other = !backward || (!std::is_same_v<Row, acts::Identity> && !std::is_same_v<Row, acts::Relu>);

template <class T, class Row, bool whole, bool backward>
__device__ inline void read_operands(const NormArgs& a, int64_t e, int lo, int hi, Operands<T>& read) {
  // Rows that are not whole octets begin anywhere, and the last octet may not be whole.
  const bool aligned = a.aligned && e % 8 == 0 && e + 8 <= a.numel;
  // In place others may be writing to what lies beside [lo, hi).
  const bool beside = aligned && ((lo == 0 && hi == 8) || a.grad_other != a.grad);
  if (backward) read.grad = read_octet<whole>(static_cast<const T*>(a.grad) + e, beside, lo, hi);
  if (!backward || a.x) read.x = read_octet<whole>(static_cast<const T*>(a.x) + e, aligned, lo, hi);
  if (needs_other<Row, backward> && a.other)
    read.other = read_octet<whole>(static_cast<const T*>(a.other) + e, aligned, lo, hi);
  if (backward && a.from_mask) read.bits = whole ? a.mask[e / 8] : bits_at(a.mask, e, hi);
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
  if (a.from_mask) {
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

// With coefficients for each element, registers for fewer.
template <class T, class Row, bool whole>
constexpr int kFlatBatch = whole ? kMapBatch<T, Row> : (kMapBatch<T, Row> + 1) / 2;

// The last blocks go first: what the pass before this one read last is still in the second-level cache.
__device__ inline int64_t from_the_end(int64_t blocks) { return blocks - 1 - blockIdx.x; }

// An octet of planes, or of rows that are not whole octets, a thread.
template <class T, class Row, bool whole, bool backward>
__global__ void __launch_bounds__(kThreads, 2) map_flat(NormArgs a, int64_t blocks) {
  using A = compute_t<T>;
  constexpr int batch = kFlatBatch<T, Row, whole>;
  const int64_t first = 8 * (from_the_end(blocks) * batch * blockDim.x + threadIdx.x), step = 8 * blockDim.x;
  Operands<T> read[batch];
#pragma unroll
  for (int u = 0; u < batch; ++u) {
    const int64_t e = first + u * step;
    if (e < a.numel)
      read_operands<T, Row, whole, backward>(a, e, 0, static_cast<int>(min(a.numel - e, int64_t{8})), read[u]);
  }
#pragma unroll
  for (int u = 0; u < batch; ++u) {
    const int64_t e = first + u * step;
    if (e >= a.numel) return;
    const int hi = whole ? 8 : static_cast<int>(min(a.numel - e, int64_t{8}));
    Channel<A> ch[8];
    A tilt[8], level[8];
    if constexpr (whole) {  // one channel
      int64_t i = e, c = a.by_inner.split(i);
      a.by_channels.split(c);
      const Channel<A> own = channel<A>(a, c);
      const A t = backward ? number_of<A>(a.tilt, c) : A(0), l = backward ? number_of<A>(a.level, c) : A(0);
#pragma unroll
      for (int k = 0; k < 8; ++k) ch[k] = own, tilt[k] = t, level[k] = l;
    } else {
      int64_t index[8];
      flat_channels(a, e, hi, ch, index);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        tilt[k] = backward ? number_of<A>(a.tilt, index[k]) : A(0);
        level[k] = backward ? number_of<A>(a.level, index[k]) : A(0);
      }
    }
    map_octet<T, Row, whole, backward>(a, read[u], e, hi, ch, tilt, level);
  }
}

// Rows of whole octets: a thread stays with its eight channels for `rows` rows of its block's.
template <class T, class Row, bool backward>
__global__ void __launch_bounds__(kThreads, 2) map_rows(NormArgs a, int64_t rows, int64_t blocks) {
  using A = compute_t<T>;
  constexpr int batch = kMapBatch<T, Row>;
  const int64_t octets = a.channels / 8, across = (octets + blockDim.x - 1) / blockDim.x;
  const int64_t block = from_the_end(blocks);
  const int64_t octet = block % across * blockDim.x + threadIdx.x, c = 8 * octet, step = blockDim.y;
  if (octet >= octets) return;
  const int64_t r0 = block / across * rows, r1 = min(r0 + rows, a.outer);
  Channel<A> ch[8];
  A tilt[8], level[8];
  eight_channels(a, c, ch);
  if (backward) eight_numbers(a.tilt, c, tilt), eight_numbers(a.level, c, level);
  for (int64_t r = r0 + threadIdx.y; r < r1; r += batch * step) {
    Operands<T> read[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (r + u * step < r1) read_operands<T, Row, true, backward>(a, (r + u * step) * a.channels + c, 0, 8, read[u]);
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (r + u * step < r1)
        map_octet<T, Row, true, backward>(a, read[u], (r + u * step) * a.channels + c, 8, ch, tilt, level);
  }
}

template <bool backward>
void map(const char* name, const NormArgs& a, Stream stream) {
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    with_common_act(a.act.kind, [&](auto row) {
      using Row = decltype(row);
      const bool whole = whole_octets_only(a);
      if (whole && !a.planar()) {
        const Block block = rows_block(a.channels);
        const int64_t across = ceil_div(a.channels / 8, block.x), least = block.y * kMapBatch<T, Row>;
        const int64_t rows = least * std::clamp<int64_t>(a.outer * across / (least * 2 * kBlocks), 1, 16);
        const int64_t blocks = across * ceil_div(a.outer, rows);
        launch(name, map_rows<T, Row, backward>, blocks, block, stream, a, rows, blocks);
      } else {
        const int64_t blocks =
            ceil_div(a.numel, 8 * kThreads * (whole ? kFlatBatch<T, Row, true> : kFlatBatch<T, Row, false>));
        launch(name, whole ? map_flat<T, Row, true, backward> : map_flat<T, Row, false, backward>, blocks,
               Block{kThreads}, stream, a, blocks);
      }
    });
  });
}

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

// grad * act(pre)
struct ScaleSums : ReadsOperands<AnyAct> {
  template <class T, bool whole, class A>
  static __device__ void values(const NormArgs& a, const Operands<T>& read, int64_t, int lo, int hi,
                                const Channel<A> (&ch)[8], A (&g)[8], A (&none)[8]) {
    A x[8], y[8];
    numbers_in(read.grad, g);
    numbers_in(read.x, x);
    affine(ch, x, y);
    act_octet(y, a.act);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      g[k] = whole || (k >= lo && k < hi) ? g[k] * y[k] : A(0);
      none[k] = 0;
    }
  }
};

// The two sums of a group, for the threads with threadIdx.y 0; 0 where there is no such group.
__device__ inline void sum_parts(const double* partial, int64_t group, int64_t groups, int64_t parts, double& sum,
                                 double& dot) {
  sum = dot = 0;
  if (group < groups) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < parts; p += kLanes) {
      sum += partial[2 * (p * groups + group)];
      dot += partial[2 * (p * groups + group) + 1];
    }
  }
  sum = sum_over_lanes(sum);
  dot = sum_over_lanes(dot);
}

__global__ void __launch_bounds__(kThreads, 2) finish_sums(SumsArgs a) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x;
  double sum, dot;
  sum_parts(a.partial, c, a.channels, a.parts, sum, dot);
  if (c >= a.channels || threadIdx.y != 0) return;
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
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x;
  double sum, none;
  sum_parts(partial, group, groups, parts, sum, none);
  if (group < groups && threadIdx.y == 0) set_output(out, f64, group, sum);
}

constexpr Block kFinish{kGroups, kLanes};
int64_t finish_blocks(int64_t n) { return ceil_div(n, kGroups); }

}  // namespace

void norm_stats(const NormArgs& a, const Split& s, double* partial, Stream stream) {
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const bool whole = whole_octets_only(a);
    if (a.planar())
      launch("stats_planar", whole ? stats_planar<T, true> : stats_planar<T, false>, planar_blocks(a, s), s.block,
             stream, a, s, partial);
    else
      launch("stats_rows", whole ? stats_rows<T, true> : stats_rows<T, false>, rows_blocks(a, s), s.block, stream, a, s,
             partial);
  });
}

void norm_finish_stats(const StatsArgs& a, Stream stream) {
  launch("finish_stats", finish_stats, finish_blocks(a.channels), kFinish, stream, a);
}

void norm_apply(const NormArgs& a, Stream stream) { map<false>("norm_apply", a, stream); }
void norm_grad(const NormArgs& a, Stream stream) { map<true>("norm_grad", a, stream); }

void norm_reduce(const NormArgs& a, const Split& s, double* partial, Stream stream) {
  with_common_act(a.act.kind, [&](auto row) { reduce<NormSums<decltype(row)>>("norm_reduce", a, s, partial, stream); });
}

void norm_finish_sums(const SumsArgs& a, Stream stream) {
  launch("finish_sums", finish_sums, finish_blocks(a.channels), kFinish, stream, a);
}

void norm_scale_grad(const NormArgs& a, const Split& s, double* partial, void* out, Stream stream) {
  reduce<ScaleSums>("norm_scale_grad", a, s, partial, stream);
  const int64_t groups = s.segments * a.channels;
  launch("finish_scale_grad", finish_scale_grad, finish_blocks(groups), kFinish, stream, partial, groups, s.parts(),
         a.dtype == Dtype::f64, out);
}

}  // namespace tsmem::cuda
