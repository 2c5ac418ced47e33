#include "cuda/pool_2d.h"

#include <cmath>
#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/reduce.h"

namespace tsmem::cuda {

namespace {

// Division of numbers below 2^31, in 32 bits.
struct Divider32 {
  uint32_t divisor, factor, shift;
  explicit Divider32(int64_t d) {
    const Divider from(d, INT32_MAX);
    divisor = static_cast<uint32_t>(d), factor = from.factor, shift = from.shift;
  }
  // n / divisor, and n becomes n % divisor.
  __device__ uint32_t split(uint32_t& n) const {
    const uint32_t q = divide(n);
    n -= q * divisor;
    return q;
  }
  __device__ uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * factor) >> 32);
    return (high + n) >> shift;
  }
};

struct Axis2d {
  int in, out, window, stride, padding;
  Divider32 by_stride;
  explicit Axis2d(const PoolAxis& a)
      : in(static_cast<int>(a.in)),
        out(static_cast<int>(a.out)),
        window(static_cast<int>(a.window)),
        stride(static_cast<int>(a.stride)),
        padding(static_cast<int>(a.padding)),
        by_stride(a.stride) {}
  // The outputs whose windows hold input i: [begin, end).
  __device__ int begin(int i) const {
    const int reach = i + padding - window + 1;
    return reach <= 0 ? 0 : static_cast<int>(by_stride.divide(static_cast<uint32_t>(reach + stride - 1)));
  }
  __device__ int end(int i) const {
    return min(static_cast<int>(by_stride.divide(static_cast<uint32_t>(i + padding))) + 1, out);
  }
};

// What the kernels need of PoolArgs. The dividers are of outputs (forward) or inputs (backward).
struct Pool2d {
  NormArgs norm;
  Axis2d h, w;
  Divider32 by_octets, by_w, by_h, by_channels;
  uint32_t channels, threads;
  const void *x, *grad;
  void* out;
  uint8_t* positions;
  Pool2d(const PoolArgs& a, bool outputs, int width)
      : norm(a.norm),
        h(a.h),
        w(a.w),
        by_octets(a.norm.channels / width),
        by_w(outputs ? a.w.out : a.w.in),
        by_h(outputs ? a.h.out : a.h.in),
        by_channels(a.norm.channels),
        channels(static_cast<uint32_t>(a.norm.channels)),
        threads(static_cast<uint32_t>((outputs ? a.outputs() : a.inputs()) / width)),
        x(a.x),
        grad(a.grad),
        out(a.out),
        positions(static_cast<uint8_t*>(a.positions)) {}
};

// Where a thread works: pixel (h, w) of image n and the channels from c on (width 8: channels last), or of plane n.
struct Place2d {
  uint32_t n, h, w, c;
};
template <int width>
__device__ inline Place2d place_of(const Pool2d& a, uint32_t index) {
  Place2d p{};
  if constexpr (width == 8) {
    p.c = index, index = a.by_octets.split(p.c), p.c *= 8;
  }
  p.w = index, index = a.by_w.split(p.w);
  p.h = index, p.n = a.by_h.split(p.h);
  return p;
}

// The element at pixel (h, w) of a map of rows of `row` pixels and images of `rows` rows.
template <int width>
__device__ inline uint32_t element(const Pool2d& a, const Place2d& p, uint32_t rows, uint32_t row, uint32_t h,
                                   uint32_t w) {
  const uint32_t pixel = (p.n * rows + h) * row + w;
  return width == 8 ? pixel * a.channels + p.c : pixel;
}

// As many elements as a thread has, 1 or 8, as they lie in memory.
template <class T, int width>
struct Some {
  using Packed = std::conditional_t<width == 8, Octet<T>, T>;
  static __device__ inline Packed read(const void* from, uint32_t e) {
    const T* p = static_cast<const T*>(from) + e;
    if constexpr (width == 8)
      return read_octet<true>(p, true, 0, 8);
    else
      return *p;
  }
  static __device__ inline void numbers(const Packed& kept, compute_t<T> (&v)[width]) {
    if constexpr (width == 8)
      numbers_in(kept, v);
    else
      v[0] = to_compute(kept);
  }
  static __device__ inline void write(const compute_t<T> (&v)[width], void* to, uint32_t e) {
    T* p = static_cast<T*>(to) + e;
    if constexpr (width == 8)
      store_octet(v, p, true, 0, 8);
    else
      from_compute(v[0], *p);
  }
};

// Eight positions, or one.
template <int width>
__device__ inline uint64_t read_positions(const uint8_t* p) {
  if constexpr (width == 8)
    return *reinterpret_cast<const uint64_t*>(p);
  else
    return *p;
}

// The channel of a thread's first element.
template <int width>
__device__ inline int64_t channel_index(const Pool2d& a, const Place2d& p) {
  uint32_t plane = p.n;
  if constexpr (width == 1) a.by_channels.split(plane);
  return width == 1 ? plane : p.c;
}

template <int width, class A>
__device__ inline void channels_of(const Pool2d& a, int64_t c, Channel<A> (&ch)[width]) {
  if constexpr (width == 8)
    eight_channels(a.norm, c, ch);
  else
    ch[0] = channel<A>(a.norm, c);
}

// A thread has one output, or those of eight channels. window: that of both axes, or 0, known at run time alone: else
// all of a window is read before the first element is used.
template <class T, int width, bool norm, int window>
__global__ void __launch_bounds__(kThreads, 2) forward_2d(Pool2d a) {
  using A = compute_t<T>;
  using Own = Some<T, width>;
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= a.threads) return;
  const Place2d p = place_of<width>(a, index);
  const int h0 = static_cast<int>(p.h) * a.h.stride - a.h.padding,
            w0 = static_cast<int>(p.w) * a.w.stride - a.w.padding;
  Channel<A> ch[width];
  if constexpr (norm) channels_of(a, channel_index<width>(a, p), ch);
  A best[width], v[width];
  uint32_t where[width];
#pragma unroll
  for (int k = 0; k < width; ++k) {
    best[k] = static_cast<A>(-INFINITY);
    where[k] = static_cast<uint32_t>(max(-h0, 0) * a.w.window + max(-w0, 0));
  }
  const auto read = [&](int kh, int kw) {
    return Own::read(a.x, element<width>(a, p, a.h.in, a.w.in, h0 + kh, w0 + kw));
  };
  const auto inside = [&](int kh, int kw) {
    return h0 + kh >= 0 && h0 + kh < a.h.in && w0 + kw >= 0 && w0 + kw < a.w.in;
  };
  const auto look = [&](const typename Own::Packed& kept, int kh, int kw) {
    Own::numbers(kept, v);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      if constexpr (norm) {  // PyTorch compares rounded values
        v[k] = Math::relu_of(fma_of(v[k] - ch[k].mean, ch[k].scale, ch[k].bias));
        v[k] = rounded<T>(v[k]);
      }
      if (v[k] > best[k] || v[k] != v[k]) best[k] = v[k], where[k] = static_cast<uint32_t>(kh * a.w.window + kw);
    }
  };
  if constexpr (window > 0) {
    typename Own::Packed kept[window][window];
#pragma unroll
    for (int kh = 0; kh < window; ++kh)
#pragma unroll
      for (int kw = 0; kw < window; ++kw)
        if (inside(kh, kw)) kept[kh][kw] = read(kh, kw);
#pragma unroll
    for (int kh = 0; kh < window; ++kh)
#pragma unroll
      for (int kw = 0; kw < window; ++kw)
        if (inside(kh, kw)) look(kept[kh][kw], kh, kw);
  } else {
    for (int kh = max(-h0, 0); kh < min(a.h.window, a.h.in - h0); ++kh)
      for (int kw = max(-w0, 0); kw < min(a.w.window, a.w.in - w0); ++kw) look(read(kh, kw), kh, kw);
  }
  const uint32_t to = width * index;  // outputs lie in the order of the threads
  Own::write(best, a.out, to);
  if (!a.positions) return;
  if constexpr (width == 8) {
    uint64_t all = 0;
#pragma unroll
    for (int k = 0; k < width; ++k) all |= static_cast<uint64_t>(where[k]) << (8 * k);
    *reinterpret_cast<uint64_t*>(a.positions + to) = all;
  } else {
    a.positions[to] = static_cast<uint8_t>(where[0]);
  }
}

// A thread has one input, or those of eight channels.
template <class T, int width, bool norm>
__global__ void __launch_bounds__(kThreads, 3) backward_2d(Pool2d a) {
  using A = compute_t<T>;
  using Own = Some<T, width>;
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= a.threads) return;
  const Place2d p = place_of<width>(a, index);
  const int h = static_cast<int>(p.h), w = static_cast<int>(p.w);
  typename Own::Packed kept{};
  if constexpr (norm) kept = Own::read(a.x, width * index);
  A sum[width], g[width];
#pragma unroll
  for (int k = 0; k < width; ++k) sum[k] = 0;
  const int h1 = a.h.end(h), w_first = a.w.begin(w), w1 = a.w.end(w);
  for (int oh = a.h.begin(h); oh < h1; ++oh) {
    const int kh = h + a.h.padding - oh * a.h.stride;
    for (int ow = w_first; ow < w1; ++ow) {
      const auto position = static_cast<uint32_t>(kh * a.w.window + w + a.w.padding - ow * a.w.stride);
      const uint32_t from = element<width>(a, p, a.h.out, a.w.out, oh, ow);
      const uint64_t won = read_positions<width>(a.positions + from);
      Own::numbers(Own::read(a.grad, from), g);
#pragma unroll
      for (int k = 0; k < width; ++k)
        if (static_cast<uint32_t>(won >> (8 * k)) % 256 == position) sum[k] += g[k];
    }
  }
  if constexpr (norm) {
    const int64_t c = channel_index<width>(a, p);
    Channel<A> ch[width];
    channels_of(a, c, ch);
    A x[width], tilt[width], level[width];
    Own::numbers(kept, x);
    if constexpr (width == 8) {
      eight_numbers(a.norm.tilt, c, tilt), eight_numbers(a.norm.level, c, level);
    } else {
      tilt[0] = number_of<A>(a.norm.tilt, c), level[0] = number_of<A>(a.norm.level, c);
    }
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const A centred = x[k] - ch[k].mean;
      const bool passes = acts::Relu::upper(fma_of(centred, ch[k].scale, ch[k].bias), ActNumbers<A>{});
      sum[k] = passes ? sum[k] * ch[k].scale : A(0);
      if (a.norm.tilt) sum[k] -= fma_of(centred, tilt[k], level[k]);
    }
  }
  Own::write(sum, a.out, width * index);
}

int64_t blocks_of(const Pool2d& a) { return (static_cast<int64_t>(a.threads) + kThreads - 1) / kThreads; }

// f(a T*, the width as a type).
template <class F>
void with_kind(const PoolArgs& a, F f) {
  with_dtype(a.norm.dtype, [&](auto* of) {
    if constexpr (!std::is_same_v<decltype(of), double*>) {  // is_common_2d() has none
      if (a.channels_last)
        f(of, std::integral_constant<int, 8>());
      else
        f(of, std::integral_constant<int, 1>());
    }
  });
}

template <class T, int width, bool norm>
void launch_forward(const PoolArgs& args, Stream stream) {
  const Pool2d a(args, /*outputs=*/true, width);
  const int64_t window = a.h.window == a.w.window ? a.h.window : 0;
  auto* kernel = window == 2   ? forward_2d<T, width, norm, 2>
                 : window == 3 ? forward_2d<T, width, norm, 3>
                               : forward_2d<T, width, norm, 0>;
  launch("pool_2d_forward", kernel, blocks_of(a), Block{kThreads}, stream, a);
}

template <class T, int width, bool norm>
void launch_backward(const PoolArgs& args, Stream stream) {
  const Pool2d a(args, /*outputs=*/false, width);
  launch("pool_2d_backward", backward_2d<T, width, norm>, blocks_of(a), Block{kThreads}, stream, a);
}

}  // namespace

bool is_common_2d(const PoolArgs& a, bool norm) {
  const auto plain = [](const PoolAxis& x) { return !x.adaptive && x.dilation == 1; };
  const int64_t reach = a.h.in + a.w.in + a.h.padding + a.w.padding + a.h.window + a.w.window + a.h.stride + a.w.stride;
  return plain(a.h) && plain(a.w) && !a.d.adaptive && a.d.in == 1 && a.d.out == 1 && a.d.window == 1 &&
         a.position_bytes == 1 && a.norm.dtype != Dtype::f64 && (!norm || a.norm.act.kind == ActKind::relu) &&
         (!a.channels_last || whole_octets_only(a.norm)) && reinterpret_cast<uintptr_t>(a.positions) % 8 == 0 &&
         a.inputs() <= INT32_MAX && a.outputs() <= INT32_MAX && reach <= INT32_MAX;
}

void pool_2d_forward(const PoolArgs& a, bool norm, Stream stream) {
  with_kind(a, [&](auto* of, auto width) {
    using T = std::remove_pointer_t<decltype(of)>;
    norm ? launch_forward<T, width.value, true>(a, stream) : launch_forward<T, width.value, false>(a, stream);
  });
}

void pool_2d_backward(const PoolArgs& a, bool norm, Stream stream) {
  with_kind(a, [&](auto* of, auto width) {
    using T = std::remove_pointer_t<decltype(of)>;
    norm ? launch_backward<T, width.value, true>(a, stream) : launch_backward<T, width.value, false>(a, stream);
  });
}

}  // namespace tsmem::cuda
