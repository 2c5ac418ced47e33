#include "cuda/pool.h"

#include <cmath>
#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/pool_2d.h"
#include "cuda/reduce.h"

namespace tsmem::cuda {

namespace {

// Where an output or an input lies.
struct Place {
  int64_t n, c, d, h, w;
};

// Of element `index` of a map that the dividers are of.
__device__ inline Place place(const PoolArgs& a, int64_t index) {
  Place p;
  if (a.channels_last) {
    int64_t rest = index;
    index = a.by_channels.split(rest);
    p.c = rest;
  }
  p.w = index, index = a.by_w.split(p.w);
  p.h = index, index = a.by_h.split(p.h);
  p.d = index, index = a.by_d.split(p.d);
  if (!a.channels_last) p.c = index, index = a.by_channels.split(p.c);
  p.n = index;
  return p;
}

// The index of element (0, 0, 0) of a plane, and the step from pixel to pixel.
__device__ inline int64_t plane_of(const PoolArgs& a, const Place& p, int64_t pixels) {
  return a.channels_last ? p.n * pixels * a.norm.channels + p.c : (p.n * a.norm.channels + p.c) * pixels;
}

__device__ inline int64_t read_position(const PoolArgs& a, int64_t i) {
  switch (a.position_bytes) {
    case 1:
      return static_cast<const uint8_t*>(a.positions)[i];
    case 2:
      return static_cast<const uint16_t*>(a.positions)[i];
    default:
      return static_cast<const uint32_t*>(a.positions)[i];
  }
}
__device__ inline void write_position(const PoolArgs& a, int64_t i, int64_t position) {
  switch (a.position_bytes) {
    case 1:
      static_cast<uint8_t*>(a.positions)[i] = static_cast<uint8_t>(position);
      return;
    case 2:
      static_cast<uint16_t*>(a.positions)[i] = static_cast<uint16_t>(position);
      return;
    default:
      static_cast<uint32_t*>(a.positions)[i] = static_cast<uint32_t>(position);
  }
}

// The index of the input at `position` of the window of the output at p; -1 where it lies outside.
__device__ inline int64_t taken(const PoolArgs& a, const Place& p, int64_t position) {
  int64_t kw = position, kh = a.w.by_window.split(kw);
  const int64_t kd = a.h.by_window.split(kh);
  const int64_t d = a.d.start(p.d) + kd * a.d.dilation, h = a.h.start(p.h) + kh * a.h.dilation,
                w = a.w.start(p.w) + kw * a.w.dilation;
  if (d >= a.d.in || h >= a.h.in || w >= a.w.in) return -1;  // a window may lie outside with all its taps
  const int64_t step = a.channels_last ? a.norm.channels : 1;
  return plane_of(a, p, a.d.in * a.h.in * a.w.in) + ((d * a.h.in + h) * a.w.in + w) * step;
}

// `width` elements from p on, 1 or 8, into the first of eight.
template <class T, int width>
__device__ inline void load_some(const T* p, bool aligned, compute_t<T> (&v)[8]) {
  if constexpr (width == 8)
    numbers_in(read_octet<false>(p, aligned, 0, 8), v);
  else
    v[0] = to_compute(*p);
}
template <class T, int width>
__device__ inline void store_some(const compute_t<T> (&v)[8], T* p, bool aligned) {
  if constexpr (width == 8)
    store_octet(v, p, aligned, 0, 8);
  else
    from_compute(v[0], *p);
}

template <class A, int width>
__device__ inline void some_channels(const NormArgs& a, int64_t c, Channel<A> (&ch)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) ch[k] = k < width ? channel<A>(a, c + k) : Channel<A>{A(0), A(0), A(0)};
}

// A thread has one output, or (width 8, channels last) the outputs of eight channels.
template <class T, int width, bool norm>
__global__ void __launch_bounds__(kThreads, 2) forward(PoolArgs a) {
  using A = compute_t<T>;
  const int64_t index = width * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (index >= a.batch * a.norm.channels * a.d.out * a.h.out * a.w.out) return;
  const Place p = place(a, index);
  const T* plane = static_cast<const T*>(a.x) + plane_of(a, p, a.d.in * a.h.in * a.w.in);
  const int64_t step = a.channels_last ? a.norm.channels : 1;
  Channel<A> ch[8];
  if constexpr (norm) some_channels<A, width>(a.norm, p.c, ch);
  const int64_t d0 = a.d.start(p.d), h0 = a.h.start(p.h), w0 = a.w.start(p.w);
  const int64_t d1 = a.d.last(p.d), h1 = a.h.last(p.h), w1 = a.w.last(p.w);
  const int64_t kd0 = a.d.first(p.d), kh0 = a.h.first(p.h), kw0 = a.w.first(p.w);
  A best[8], v[8];
  int64_t where[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    best[k] = static_cast<A>(-INFINITY);
    v[k] = 0;
    where[k] = (kd0 * a.h.window + kh0) * a.w.window + kw0;
  }
  for (int64_t kd = kd0; kd < d1; ++kd)
    for (int64_t kh = kh0; kh < h1; ++kh)
      for (int64_t kw = kw0; kw < w1; ++kw) {
        const int64_t pixel =
            ((d0 + kd * a.d.dilation) * a.h.in + h0 + kh * a.h.dilation) * a.w.in + w0 + kw * a.w.dilation;
        load_some<T, width>(plane + pixel * step, a.norm.aligned, v);
        if constexpr (norm) {
          affine(ch, v, v);
          act_octet(v, a.norm.act);
#pragma unroll
          for (int k = 0; k < width; ++k) v[k] = rounded<T>(v[k]);  // PyTorch compares rounded values
        }
        const int64_t position = (kd * a.h.window + kh) * a.w.window + kw;
#pragma unroll
        for (int k = 0; k < width; ++k)
          if (v[k] > best[k] || v[k] != v[k]) best[k] = v[k], where[k] = position;
      }
  store_some<T, width>(best, static_cast<T*>(a.out) + index, a.norm.aligned);
  if (!a.positions) return;
#pragma unroll
  for (int k = 0; k < width; ++k) write_position(a, index + k, where[k]);
}

// A thread has one input, or those of eight channels.
template <class T, int width, bool norm>
__global__ void __launch_bounds__(kThreads, 2) backward(PoolArgs a) {
  using A = compute_t<T>;
  const int64_t index = width * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (index >= a.batch * a.norm.channels * a.d.in * a.h.in * a.w.in) return;
  const Place p = place(a, index);
  const int64_t plane = plane_of(a, p, a.d.out * a.h.out * a.w.out), step = a.channels_last ? a.norm.channels : 1;
  const T* grad = static_cast<const T*>(a.grad);
  A sum[8], g[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = g[k] = 0;
  const int64_t d1 = a.d.outputs_end(p.d), h1 = a.h.outputs_end(p.h), w1 = a.w.outputs_end(p.w);
  for (int64_t od = a.d.outputs_begin(p.d); od < d1; ++od) {
    const int64_t kd = a.d.tap(p.d, od);
    if (kd < 0) continue;
    for (int64_t oh = a.h.outputs_begin(p.h); oh < h1; ++oh) {
      const int64_t kh = a.h.tap(p.h, oh);
      if (kh < 0) continue;
      for (int64_t ow = a.w.outputs_begin(p.w); ow < w1; ++ow) {
        const int64_t kw = a.w.tap(p.w, ow);
        if (kw < 0) continue;
        const int64_t position = (kd * a.h.window + kh) * a.w.window + kw;
        const int64_t from = plane + ((od * a.h.out + oh) * a.w.out + ow) * step;
        load_some<T, width>(grad + from, a.norm.aligned, g);
#pragma unroll
        for (int k = 0; k < width; ++k)
          if (read_position(a, from + k) == position) sum[k] += g[k];
      }
    }
  }
  if constexpr (norm) {
    Channel<A> ch[8];
    some_channels<A, width>(a.norm, p.c, ch);
    A x[8], pre[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = 0;
    load_some<T, width>(static_cast<const T*>(a.x) + index, a.norm.aligned, x);
    affine(ch, x, pre);
    act_backward_octet(pre, sum, a.norm.act);
    const A *tilt = static_cast<const A*>(a.norm.tilt), *level = static_cast<const A*>(a.norm.level);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sum[k] *= ch[k].scale;
      if (tilt) sum[k] -= fma_of(x[k] - ch[k].mean, tilt[p.c + k], level[p.c + k]);
    }
  }
  store_some<T, width>(sum, static_cast<T*>(a.out) + index, a.norm.aligned);
}

// One output a thread: what is read lies scattered.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) again(PoolArgs a) {
  using A = compute_t<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= a.batch * a.norm.channels * a.d.out * a.h.out * a.w.out) return;
  const Place p = place(a, index);
  const int64_t from = taken(a, p, read_position(a, index));
  T* out = static_cast<T*>(a.out) + index;
  if (from < 0) {
    from_compute(static_cast<A>(-INFINITY), *out);
    return;
  }
  Channel<A> ch[8];
  some_channels<A, 1>(a.norm, p.c, ch);
  A v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = 0;
  v[0] = to_compute(static_cast<const T*>(a.x)[from]);
  affine(ch, v, v);
  act_octet(v, a.norm.act);
  from_compute(v[0], *out);
}

// grad_pre and grad_pre * (x - mean) of the inputs that won; e counts outputs.
struct PoolSums {
  template <class T>
  using Read = Octet<T>;
  template <class T>
  static constexpr int batch = 1;
  template <class T, bool whole>
  static __device__ void read(const PoolArgs& a, int64_t e, int lo, int hi, Octet<T>& grad) {
    grad = read_octet<whole>(static_cast<const T*>(a.grad) + e, a.norm.aligned && e % 8 == 0 && e + 8 <= a.norm.numel,
                             lo, hi);
  }
  template <class T, bool whole, class A>
  static __device__ void values(const PoolArgs& a, const Octet<T>& grad, int64_t e, int lo, int hi,
                                const Channel<A> (&ch)[8], A (&g)[8], A (&dot)[8]) {
    numbers_in(grad, g);
    A x[8], pre[8];
    Place p = place(a, e + lo);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x[k] = ch[k].mean;
      if (k < lo || k >= hi) {
        g[k] = 0;
        continue;
      }
      if (k > lo && a.channels_last) ++p.c;
      if (k > lo && !a.channels_last) p = place(a, e + k);
      const int64_t from = taken(a, p, read_position(a, e + k));
      if (from < 0)
        g[k] = 0;
      else
        x[k] = to_compute(static_cast<const T*>(a.x)[from]);
    }
    affine(ch, x, pre);
    act_backward_octet(pre, g, a.norm.act);
#pragma unroll
    for (int k = 0; k < 8; ++k) dot[k] = g[k] * (x[k] - ch[k].mean);
  }
};

int64_t blocks_of(int64_t n) { return (n + kThreads - 1) / kThreads; }
bool by_octets(const PoolArgs& a) { return a.channels_last && a.norm.channels % 8 == 0; }

template <bool norm>
void launch_forward(const PoolArgs& a, Stream stream) {
  if (is_common_2d(a, norm)) return pool_2d_forward(a, norm, stream);
  with_dtype(a.norm.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (by_octets(a))
      launch("pool_forward", forward<T, 8, norm>, blocks_of(a.outputs() / 8), Block{kThreads}, stream, a);
    else
      launch("pool_forward", forward<T, 1, norm>, blocks_of(a.outputs()), Block{kThreads}, stream, a);
  });
}
template <bool norm>
void launch_backward(const PoolArgs& a, Stream stream) {
  if (is_common_2d(a, norm)) return pool_2d_backward(a, norm, stream);
  with_dtype(a.norm.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (by_octets(a))
      launch("pool_backward", backward<T, 8, norm>, blocks_of(a.inputs() / 8), Block{kThreads}, stream, a);
    else
      launch("pool_backward", backward<T, 1, norm>, blocks_of(a.inputs()), Block{kThreads}, stream, a);
  });
}

}  // namespace

__host__ __device__ inline const NormArgs& norm_of(const PoolArgs& a) { return a.norm; }

void prepare(PoolArgs& a, bool of_outputs) {
  for (PoolAxis* axis : {&a.d, &a.h, &a.w}) axis->prepare(a.d.window * a.h.window * a.w.window);
  const int64_t largest = of_outputs ? a.outputs() : a.inputs();
  const auto of = [&](const PoolAxis& axis) { return Divider(of_outputs ? axis.out : axis.in, largest); };
  a.by_channels = Divider(a.norm.channels, largest);
  a.by_d = of(a.d);
  a.by_h = of(a.h);
  a.by_w = of(a.w);
}

void pool_forward(const PoolArgs& a, Stream stream) { launch_forward<false>(a, stream); }
void pool_backward(const PoolArgs& a, Stream stream) { launch_backward<false>(a, stream); }
void norm_pool_forward(const PoolArgs& a, Stream stream) { launch_forward<true>(a, stream); }
void norm_pool_backward(const PoolArgs& a, Stream stream) { launch_backward<true>(a, stream); }

void norm_pool_again(const PoolArgs& a, Stream stream) {
  with_dtype(a.norm.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    launch("norm_pool_again", again<T>, blocks_of(a.outputs()), Block{kThreads}, stream, a);
  });
}

void norm_pool_reduce(const PoolArgs& a, const Split& s, double* partial, Stream stream) {
  reduce<PoolSums>("norm_pool_reduce", a, s, partial, stream);
}

}  // namespace tsmem::cuda
