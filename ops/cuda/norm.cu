#include "cuda/norm.h"

#include <algorithm>

#include "cuda/norm_parts.h"

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
  stats_of_rows<T, whole, 8>(a, s, own_place(), partial, [](const Octet<T>&) {});
}

__global__ void __launch_bounds__(kThreads, 2) finish_stats(StatsArgs a) { finish_channels(a, own_place()); }

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

__global__ void __launch_bounds__(kThreads, 2) finish_sums(SumsArgs a) { finish_channels(a, own_place()); }

__global__ void __launch_bounds__(kThreads, 2)
    finish_scale_grad(const double* partial, int64_t groups, int64_t parts, bool f64, void* out) {
  const Place at = own_place();
  const int64_t group = at.block * kGroups + at.x;
  double sum, none;
  sum_parts(partial, group, groups, parts, at, sum, none);
  if (group < groups && at.y == 0) set_output(out, f64, group, sum);
}

constexpr Block kFinish{kGroups, kLanes};

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
