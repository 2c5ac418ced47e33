// Reductions over the channels of a feature map: two sums at once, split over blocks, in a fixed order.
#pragma once
#include <type_traits>

#include "cuda/element.h"
#include "cuda/norm.h"

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

// The sum of a warp's 32 numbers, for all of them.
__device__ inline double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// The sum over the block's threads, a multiple of 32, for all of them.
__device__ inline double block_sum(double v) {
  __shared__ double sums[kThreads / 32];
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

// The sums over the threads of equal threadIdx.x, for all of them. blockDim.y is a power of two.
__device__ inline void sum_over_y(double (&v)[8]) {
  __shared__ double sums[8][kThreads];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 8; ++k) sums[k][thread] = v[k];
  __syncthreads();
  for (unsigned step = blockDim.y / 2; step > 0; step /= 2) {
    if (threadIdx.y < step)
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k][thread] += sums[k][thread + step * blockDim.x];
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = sums[k][threadIdx.x];
  __syncthreads();  // the next call writes to `sums`
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

// Calls f(first element, lo, hi) for this thread's octets of the block's part; elements [lo, hi) of each are the
// group's.
template <class F>
__device__ inline void planar_octets(const NormArgs& a, const Split& s, const PlanarBlock& b, F f) {
  const int64_t per_segment = a.outer / s.segments, first = b.group / a.channels * per_segment;
  const int64_t n0 = first + begin_of(per_segment, b.part / s.over_inner, s.over_outer);
  const int64_t n1 = first + begin_of(per_segment, b.part / s.over_inner + 1, s.over_outer);
  const int64_t slice = b.part % s.over_inner;
  for (int64_t n = n0 + threadIdx.y; n < n1; n += blockDim.y) {
    const int64_t start = (n * a.channels + b.c) * a.inner, end = start + a.inner;
    const int64_t octet = start / 8, octets = (end + 7) / 8 - octet;
    const int64_t o1 = octet + begin_of(octets, slice + 1, s.over_inner);
    for (int64_t o = octet + begin_of(octets, slice, s.over_inner) + threadIdx.x; o < o1; o += blockDim.x) {
      const int64_t e = 8 * o;
      f(e, static_cast<int>(max(start - e, int64_t{0})), static_cast<int>(min(end - e, int64_t{8})));
    }
  }
}

// Rows: each thread has eight channels from c on, of which `width` are there, and every blockDim.y-th row of its part.
struct RowsBlock {
  int64_t segment, part, c, r0, r1;
  int width;
  __device__ RowsBlock(const NormArgs& a, const Split& s) {
    const int64_t across = ((a.channels + 7) / 8 + blockDim.x - 1) / blockDim.x;
    const int64_t index = blockIdx.x / across, parts = s.over_outer;
    segment = index / parts;
    part = index % parts;
    c = 8 * (static_cast<int64_t>(blockIdx.x % across) * blockDim.x + threadIdx.x);
    width = static_cast<int>(max(min(a.channels - c, int64_t{8}), int64_t{0}));
    const int64_t rows = a.outer / s.segments;
    r0 = segment * rows + begin_of(rows, part, parts);
    r1 = segment * rows + begin_of(rows, part + 1, parts);
  }
};

inline int64_t rows_blocks(const NormArgs& a, const Split& s) {
  return ((a.channels + 7) / 8 + s.block.x - 1) / s.block.x * s.segments * s.over_outer;
}
inline int64_t planar_blocks(const NormArgs& a, const Split& s) { return s.segments * a.channels * s.parts(); }

// partial[group, part] = the sums of the two numbers an element that
// S::values(args, first element, lo, hi, aligned, channels of the eight, first, second) gives; 0 outside [lo, hi).
template <class T, class S, class Args>
__global__ void __launch_bounds__(kThreads, 2) reduce_planar(Args args, Split s, double* partial) {
  using A = compute_t<T>;
  const NormArgs& a = norm_of(args);
  const PlanarBlock b(a, s);
  Channel<A> ch[8];
  ch[0] = channel<A>(a, b.c);
#pragma unroll
  for (int k = 1; k < 8; ++k) ch[k] = ch[0];
  A first = 0, second = 0;
  planar_octets(a, s, b, [&](int64_t e, int lo, int hi) {
    A u[8], v[8];
    S::template values<T>(args, e, lo, hi, a.aligned, ch, u, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) first += u[k], second += v[k];
  });
  const double sum = block_sum(first), dot = block_sum(second);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    double* to = partial + 2 * (b.group * s.parts() + b.part);
    to[0] = sum;
    to[1] = dot;
  }
}

template <class T, class S, class Args>
__global__ void __launch_bounds__(kThreads, 2) reduce_rows(Args args, Split s, double* partial) {
  using A = compute_t<T>;
  const NormArgs& a = norm_of(args);
  const RowsBlock b(a, s);
  Channel<A> ch[8];
  A first[8], second[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    first[k] = second[k] = 0;
    ch[k] = k < b.width ? channel<A>(a, b.c + k) : Channel<A>{A(0), A(0), A(0)};
  }
  const bool aligned = a.aligned && a.channels % 8 == 0;
  if (b.width > 0)
    for (int64_t r = b.r0 + threadIdx.y; r < b.r1; r += blockDim.y) {
      A u[8], v[8];
      S::template values<T>(args, r * a.channels + b.c, 0, b.width, aligned, ch, u, v);
#pragma unroll
      for (int k = 0; k < 8; ++k) first[k] += u[k], second[k] += v[k];
    }
  double sum[8], dot[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = first[k], dot[k] = second[k];
  sum_over_y(sum);
  sum_over_y(dot);
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < b.width) {
      double* to = partial + 2 * ((b.segment * a.channels + b.c + k) * s.over_outer + b.part);
      to[0] = sum[k];
      to[1] = dot[k];
    }
}

template <class S, class Args>
inline void reduce(const char* name, const Args& args, const Split& s, double* partial, Stream stream) {
  const NormArgs& a = norm_of(args);
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (a.planar())
      launch(name, reduce_planar<T, S, Args>, planar_blocks(a, s), s.block, stream, args, s, partial);
    else
      launch(name, reduce_rows<T, S, Args>, rows_blocks(a, s), s.block, stream, args, s, partial);
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
