// Reductions over the channels of a feature map: two sums at once, split over blocks, in a fixed order.
#pragma once
#include <type_traits>

#include "cuda/element.h"
#include "cuda/norm.h"
#include "cuda/shared.h"

namespace tsmem::cuda {

constexpr int kThreads = 256;  // of a block, at most

// Coefficients of a channel.
template <class A>
struct Channel {
  A mean, scale, bias;
};

template <class A>
__device__ inline Channel<A> channel(const NormArgs& a, int64_t c) {
  if (!a.mean) return {A(0), A(1), A(0)};
  return {static_cast<const A*>(a.mean)[c], static_cast<const A*>(a.invstd)[c] * number(a.weight, c, A(1)),
          number(a.bias, c, A(0))};
}

// Number c of a vector, and numbers c to c + 7, c a multiple of 8; 0 where there is no vector.
template <class A>
__device__ inline A number_of(const void* numbers, int64_t c) {
  return numbers ? static_cast<const A*>(numbers)[c] : A(0);
}
template <class A>
__device__ inline void eight_numbers(const void* numbers, int64_t c, A (&to)[8]) {
  Octet<A> own{};
  if (numbers)
    own = read_octet<false>(static_cast<const A*>(numbers) + c, reinterpret_cast<uintptr_t>(numbers) % 16 == 0, 0, 8);
  numbers_in(own, to);
}
template <class A>
__device__ inline void eight_numbers(const Numbers& numbers, int64_t c, A otherwise, A (&to)[8]) {
  const bool own = numbers.dtype == (sizeof(A) == 8 ? Dtype::f64 : Dtype::f32);
  if (numbers.data && own && numbers.stride == 1) return eight_numbers(numbers.data, c, to);
#pragma unroll
  for (int k = 0; k < 8; ++k) to[k] = number(numbers, c + k, otherwise);
}

// Channels c to c + 7, c a multiple of 8.
template <class A>
__device__ inline void eight_channels(const NormArgs& a, int64_t c, Channel<A> (&ch)[8]) {
  A mean[8], invstd[8], weight[8], bias[8];
  if (a.mean) {
    eight_numbers(a.mean, c, mean);
    eight_numbers(a.invstd, c, invstd);
    eight_numbers(a.weight, c, A(1), weight);
    eight_numbers(a.bias, c, A(0), bias);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k)
    ch[k] = a.mean ? Channel<A>{mean[k], invstd[k] * weight[k], bias[k]} : Channel<A>{A(0), A(1), A(0)};
}

// Where a thread works: at (x, y) of `wide` times `high` threads, on what is a block's, of that number.
struct Place {
  int64_t block;
  unsigned x, y, wide, high;
  __device__ unsigned thread() const { return y * wide + x; }
};
__device__ inline Place own_place() { return {blockIdx.x, threadIdx.x, threadIdx.y, blockDim.x, blockDim.y}; }
// In a block of kThreads in a row that does the work of another one. Those that are too many have y >= high.
__device__ inline Place place_in(int64_t block, Block of) {
  return {block, threadIdx.x % of.x, threadIdx.x / of.x, of.x, of.y};
}

// The sum of a warp's 32 numbers, for all of them.
__device__ inline double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// The sum over the block's threads, a multiple of 32, for all of them.
__device__ inline double block_sum(double v) {
  struct Sums;
  auto& sums = shared<Sums, double[kThreads / 32]>();
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
  v = warp_sum(v);
  if (warps == 1) return v;
  if (thread % 32 == 0) sums[thread / 32] = v;
  __syncthreads();
  v = 0;
  for (unsigned w = 0; w < warps; ++w) v += sums[w];
  __syncthreads();  // the next call writes to `sums`
  return v;
}

// The sums over at.y, channel by channel: thread i < 8 * at.wide gets that of the block's i-th channel. at.high is 8 or
// more. at_once: how many of the eight are exchanged at once; fewer take less shared memory.
template <int at_once = 8, class A>
__device__ inline double sum_over_rows(const A (&v)[8], const Place& at) {
  struct Rows;
  auto& values = shared<Rows, A[at_once][kThreads + 1]>();  // one more: other banks
  const unsigned thread = at.thread();
  double sum = 0;
#pragma unroll
  for (unsigned first = 0; first < 8; first += at_once) {
#pragma unroll
    for (int k = 0; k < at_once; ++k) values[k][thread] = v[first + k];
    __syncthreads();
    if (thread < 8 * at.wide && thread % 8 / at_once == first / at_once)
      for (unsigned y = 0; y < at.high; ++y) sum += values[thread % at_once][y * at.wide + thread / 8];
    __syncthreads();  // what comes next writes to `values`
  }
  return sum;
}

// Part `part` of [0, n).
__device__ inline int64_t begin_of(int64_t n, int64_t part, int64_t parts) {
  return n / parts * part + min(n % parts, part);
}

// Where a block works: group = segment * channels + channel (planar).
struct PlanarBlock {
  int64_t group, part, c;
  __device__ PlanarBlock(const NormArgs& a, const Split& s) {
    const int64_t groups = s.segments * a.channels;
    // Neighbouring blocks read neighbouring planes.
    group = blockIdx.x % groups;
    part = blockIdx.x / groups;
    c = group % a.channels;
  }
};

// Up to `batch` of a thread's octets: elements [lo, hi) of each are the group's, none where hi is 0.
template <int batch>
struct Octets {
  int64_t e[batch];
  int lo[batch], hi[batch];
};

// Calls f(octets) for all octets of this thread in the block's part, `batch` at a time, so that all of them are read
// before the first is used. whole: planes are whole octets.
template <int batch, bool whole, class F>
__device__ inline void planar_octets(const NormArgs& a, const Split& s, const PlanarBlock& b, F f) {
  const int64_t per_segment = a.outer / s.segments, first = b.group / a.channels * per_segment;
  const int64_t n0 = first + begin_of(per_segment, b.part / s.over_inner, s.over_outer);
  const int64_t n1 = first + begin_of(per_segment, b.part / s.over_inner + 1, s.over_outer);
  // A plane that begins anywhere touches one octet more than it fills.
  const int64_t slice = b.part % s.over_inner, octets = whole ? a.inner / 8 : (a.inner + 7) / 8 + 1;
  const int64_t o0 = begin_of(octets, slice, s.over_inner), own = begin_of(octets, slice + 1, s.over_inner) - o0;
  // The part's octets, counted through all its planes.
  const int64_t total = (n1 - n0) * own, threads = blockDim.x * blockDim.y;
  for (int64_t i = threadIdx.y * blockDim.x + threadIdx.x; i < total; i += batch * threads) {
    Octets<batch> to;
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      to.lo[u] = to.hi[u] = 0;
      const int64_t at = i + u * threads;
      if (at >= total) continue;
      const int64_t n = s.fits ? static_cast<uint32_t>(at) / static_cast<uint32_t>(own) : at / own;
      const int64_t start = ((n0 + n) * a.channels + b.c) * a.inner;
      to.e[u] = 8 * (start / 8 + o0 + at - n * own);
      to.lo[u] = whole ? 0 : static_cast<int>(max(start - to.e[u], int64_t{0}));
      to.hi[u] = whole ? 8 : static_cast<int>(max(min(start + a.inner - to.e[u], int64_t{8}), int64_t{0}));
    }
    f(to);
  }
}

// Rows: each thread has eight channels from c on, of which `width` are there, and every at.high-th row of its part.
struct RowsBlock {
  int64_t segment, part, first, c, r0, r1;  // first: the block's first channel
  int width;
  __device__ RowsBlock(const NormArgs& a, const Split& s, const Place& at) {
    const int64_t across = ((a.channels + 7) / 8 + at.wide - 1) / at.wide;
    const int64_t index = at.block / across, parts = s.over_outer;
    segment = index / parts;
    part = index % parts;
    first = 8 * (at.block % across) * at.wide;
    c = first + 8 * at.x;
    width = at.y < at.high ? static_cast<int>(max(min(a.channels - c, int64_t{8}), int64_t{0})) : 0;
    const int64_t rows = a.outer / s.segments;
    r0 = segment * rows + begin_of(rows, part, parts);
    r1 = segment * rows + begin_of(rows, part + 1, parts);
  }
};

inline int64_t rows_blocks(const NormArgs& a, const Split& s) {
  return ((a.channels + 7) / 8 + s.block.x - 1) / s.block.x * s.segments * s.over_outer;
}
inline int64_t planar_blocks(const NormArgs& a, const Split& s) { return s.segments * a.channels * s.parts(); }

// Reads of each operand that a thread has under way: 64 bytes.
template <class T>
constexpr int kBatch = 8 / sizeof(T);

// partial[part, group] = the sums of the two numbers an element that S gives: S::read<T, whole> an octet's operands,
// S::values<T, whole>(args, what was read, first element, lo, hi, channels of the eight, first, second) its numbers, 0
// outside [lo, hi).
template <class T, class S, bool whole, class Args>
__global__ void __launch_bounds__(kThreads, 2) reduce_planar(Args args, Split s, double* partial) {
  using A = compute_t<T>;
  using Read = typename S::template Read<T>;
  const NormArgs& a = norm_of(args);
  const PlanarBlock b(a, s);
  Channel<A> ch[8];
  ch[0] = channel<A>(a, b.c);
#pragma unroll
  for (int k = 1; k < 8; ++k) ch[k] = ch[0];
  A first = 0, second = 0;
  const auto add = [&](const Read& read, int64_t e, int lo, int hi) {
    A u[8], v[8];
    S::template values<T, whole>(args, read, e, lo, hi, ch, u, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) first += u[k], second += v[k];
  };
  constexpr int batch = S::template batch<T>;
  planar_octets<batch, whole>(a, s, b, [&](const Octets<batch>& at) {
    Read read[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (at.hi[u] > 0) S::template read<T, whole>(args, at.e[u], at.lo[u], at.hi[u], read[u]);
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (at.hi[u] > 0) add(read[u], at.e[u], at.lo[u], at.hi[u]);
  });
  const double sum = block_sum(first), dot = block_sum(second);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    double* to = partial + 2 * (b.part * s.segments * a.channels + b.group);
    to[0] = sum;
    to[1] = dot;
  }
}

// The same of a block's rows. keep(what was read, first): row by row. Index: has room for any element's.
template <class T, class S, bool whole, class Index, class Args, class Keep>
__device__ inline void sums_of_rows(const Args& args, const Split& s, const Place& at, double* partial,
                                    const Keep& keep) {
  using A = compute_t<T>;
  const NormArgs& a = norm_of(args);
  const RowsBlock b(a, s, at);
  Channel<A> ch[8];
  A first[8], second[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    first[k] = second[k] = 0;
    if (!whole) ch[k] = k < b.width ? channel<A>(a, b.c + k) : Channel<A>{A(0), A(0), A(0)};
  }
  if (whole && b.width > 0) eight_channels(a, b.c, ch);
  constexpr int batch = S::template batch<T>;
  const auto step = static_cast<Index>(at.high), channels = static_cast<Index>(a.channels);
  const auto c0 = static_cast<Index>(b.c), end = static_cast<Index>(b.r1);
  if (b.width > 0)
    for (auto r = static_cast<Index>(b.r0 + at.y); r < end; r += batch * step) {
      typename S::template Read<T> read[batch];
#pragma unroll
      for (int u = 0; u < batch; ++u)
        if (r + u * step < end) S::template read<T, whole>(args, (r + u * step) * channels + c0, 0, b.width, read[u]);
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        if (r + u * step >= end) continue;
        A x[8], y[8];
        S::template values<T, whole>(args, read[u], (r + u * step) * channels + c0, 0, b.width, ch, x, y);
        keep(read[u], x);
#pragma unroll
        for (int k = 0; k < 8; ++k) first[k] += x[k], second[k] += y[k];
      }
    }
  const double sum = sum_over_rows(first, at), dot = sum_over_rows(second, at);
  const int64_t c = b.first + at.thread();
  if (c >= min(b.first + 8 * static_cast<int64_t>(at.wide), a.channels)) return;
  double* to = partial + 2 * ((b.part * s.segments + b.segment) * a.channels + c);
  to[0] = sum;
  to[1] = dot;
}

template <class T, class S, bool whole, class Args>
__global__ void __launch_bounds__(kThreads, 2) reduce_rows(Args args, Split s, double* partial) {
  sums_of_rows<T, S, whole, int64_t>(args, s, own_place(), partial, [](const auto&, const auto&) {});
}

// Whether all octets are eight neighbours of one row, or of one plane, at multiples of 16 bytes.
inline bool whole_octets_only(const NormArgs& a) { return a.aligned && (a.planar() ? a.inner : a.channels) % 8 == 0; }

template <class S, class Args>
inline void reduce(const char* name, const Args& args, const Split& s, double* partial, Stream stream) {
  const NormArgs& a = norm_of(args);
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const bool whole = whole_octets_only(a);
    if (a.planar())
      launch(name, whole ? reduce_planar<T, S, true, Args> : reduce_planar<T, S, false, Args>, planar_blocks(a, s),
             s.block, stream, args, s, partial);
    else
      launch(name, whole ? reduce_rows<T, S, true, Args> : reduce_rows<T, S, false, Args>, rows_blocks(a, s), s.block,
             stream, args, s, partial);
  });
}

__host__ __device__ inline const NormArgs& norm_of(const NormArgs& a) { return a; }

// pre = (x - mean) * scale + bias
template <class A>
__device__ inline void affine(const Channel<A> (&ch)[8], const A (&x)[8], A (&pre)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) pre[k] = fma_of(x[k] - ch[k].mean, ch[k].scale, ch[k].bias);
}

}  // namespace tsmem::cuda
