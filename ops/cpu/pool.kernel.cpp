#include "cpu/pool.h"

#include <limits>
#include <type_traits>

#include "cpu/convert.h"

namespace tsmem::TSMEM_ISA {
namespace {

constexpr int64_t kBlock =
    128;  // outputs or channels at once: their maxima and positions stay in registers or the first-level cache
constexpr int64_t kRow = 2048;    // a converted row of a half-precision input
constexpr int64_t kTable = 1024;  // windows to this size find their offsets in a table
constexpr int64_t kSelect = 27;   // and to this size, channels last scatters by comparing with every position

// As wide as what is compared, so that both share a mask.
template <class C>
using lane_t = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t div_up(int64_t a, int64_t b) { return a <= 0 ? -(-a / b) : (a + b - 1) / b; }
inline int64_t div_down(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// best and where take x, whose step is `stride` elements, where it is greater or NaN.
template <class C, class E>
inline void take(const E* __restrict x, int64_t stride, C* __restrict best, lane_t<C>* __restrict where,
                 lane_t<C> position, int64_t n) {
  auto loop = [&](auto step) {
    for (int64_t i = 0; i < n; ++i) {
      const C v = to_compute(x[i * step]);
      const bool wins = (v > best[i]) | (v != v);
      best[i] = wins ? v : best[i];
      where[i] = wins ? position : where[i];
    }
  };
  if (stride == 1) return loop(std::integral_constant<int64_t, 1>{});
  if (stride == 2) return loop(std::integral_constant<int64_t, 2>{});
  loop(stride);
}

template <class P, class L>
inline void put_positions(const L* __restrict where, P* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<P>(where[i]);
}

// Where an output row or pixel of axis indices (d, h) lies.
struct Row {
  int64_t plane, d, h;
};
inline Row row_of(const PoolArgs& a, int64_t index) {
  return {index / (a.h.out * a.d.out), index / a.h.out % a.d.out, index % a.h.out};
}

template <class T, class P>
void forward_planar(const PoolArgs& a, const T* x, T* y, P* position, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  using L = lane_t<C>;
  alignas(64) C best[kBlock];
  alignas(64) L where[kBlock];
  alignas(64) C converted[kRow];
  constexpr bool same = std::is_same_v<T, C>;
  for (int64_t index = begin; index < end; ++index) {
    const Row r = row_of(a, index);
    const T* plane = x + r.plane * a.d.in * a.h.in * a.w.in;
    const int64_t out = index * a.w.out;
    for (int64_t o = 0; o < a.w.out; o += kBlock) {
      const int64_t n = lesser(kBlock, a.w.out - o);
      const L row_first = static_cast<L>((a.d.first[r.d] * a.h.window + a.h.first[r.h]) * a.w.window);
      for (int64_t i = 0; i < n; ++i) {
        best[i] = -std::numeric_limits<C>::infinity();
        where[i] = row_first + static_cast<L>(a.w.first[o + i]);
      }
      for (int64_t kd = a.d.first[r.d]; kd < a.d.last[r.d]; ++kd) {
        for (int64_t kh = a.h.first[r.h]; kh < a.h.last[r.h]; ++kh) {
          const int64_t id = a.d.start[r.d] + kd * a.d.dilation, ih = a.h.start[r.h] + kh * a.h.dilation;
          const T* row = plane + (id * a.h.in + ih) * a.w.in;
          const L at = static_cast<L>((kd * a.h.window + kh) * a.w.window);
          auto scan = [&](const auto* in) {
            if (a.w.stride == 0) {
              for (int64_t i = 0; i < n; ++i)
                for (int64_t k = a.w.first[o + i]; k < a.w.last[o + i]; ++k)
                  take(in + a.w.start[o + i] + k * a.w.dilation, 1, best + i, where + i, static_cast<L>(at + k), 1);
              return;
            }
            for (int64_t k = 0; k < a.w.window; ++k) {
              const int64_t offset = a.w.start[0] + k * a.w.dilation;
              const int64_t lo = greater(o, div_up(-offset, a.w.stride));
              const int64_t hi = lesser(o + n, div_down(a.w.in - 1 - offset, a.w.stride) + 1);
              if (lo < hi)
                take(in + offset + lo * a.w.stride, a.w.stride, best + lo - o, where + lo - o, static_cast<L>(at + k),
                     hi - lo);
            }
          };
          if constexpr (same) {
            scan(row);
          } else if (a.w.in <= kRow) {
            widen(row, converted, a.w.in);
            scan(static_cast<const C*>(converted));
          } else {
            scan(row);
          }
        }
      }
      narrow(best, y + out + o, n);
      if (position) put_positions(where, position + out + o, n);
    }
  }
}

// Rows that are shorter than a block: those of a plane are put into one, with what pads them, so that few long loops
// do. A stride takes them apart first: pixels that windows see at the same k lie side by side, a part for each
// remainder of row and column by the stride. What lies across a row's end is left out at the end.
constexpr int64_t kPut = 4096;  // pixels that are put together

struct Together {
  int64_t parts, width, more;  // of a part: the length of a row, and rows beyond those of the output
  int64_t most;                // rows of the output

  explicit Together(const PoolArgs& a)
      : parts(a.h.stride * a.w.stride),
        width(a.w.out + (a.w.window - 1) * a.w.dilation / greater(1, a.w.stride)),
        more((a.h.window - 1) * a.h.dilation / greater(1, a.h.stride)),
        most(kPut / (greater(1, parts) * width) - more) {}
  // Where windows overlap: else each pixel is read once as it is. Taking float64 apart costs more than it gains.
  bool fits(const PoolArgs& a) const {
    const bool overlap = a.w.stride < a.w.window && a.h.stride <= a.h.window;
    return a.d.in == 1 && a.d.out == 1 && parts > 0 && (a.dtype != Dtype::f64 || parts == 1) && overlap &&
           a.w.out < kBlock && most > 0;
  }
};

// Row `from` of the input, apart by the column's remainder, from `to` on, a part's size `step`.
template <class T>
inline void put_row(const PoolArgs& a, const T* from, compute_t<T>* to, int64_t step, int64_t width) {
  for (int64_t p = 0; p < a.w.stride; ++p, to += step) {
    const int64_t first = a.w.start[0] + p;
    if (a.w.stride == 1) {
      const int64_t lo = greater(0, -first);
      widen(from + first + lo, to + lo, lesser(width, a.w.in - first) - lo);
      continue;
    }
    const int64_t lo = greater(0, div_up(-first, a.w.stride)),
                  hi = lesser(width, div_down(a.w.in - 1 - first, a.w.stride) + 1);
    for (int64_t i = lo; i < hi; ++i) to[i] = to_compute(from[first + i * a.w.stride]);
  }
}

template <class T, class P>
void forward_planar_together(const PoolArgs& a, const Together& t, const T* x, T* y, P* position, int64_t begin,
                             int64_t end) {
  using C = compute_t<T>;
  using L = lane_t<C>;
  alignas(64) C from[kPut];
  alignas(64) C best[kPut];
  alignas(64) L where[kPut];
  for (int64_t index = begin; index < end;) {
    const int64_t h = index % a.h.out, rows = lesser(lesser(t.most, a.h.out - h), end - index);
    const int64_t part = (rows + t.more) * t.width, count = (rows - 1) * t.width + a.w.out;
    const T* plane = x + index / a.h.out * a.h.in * a.w.in;
    for (int64_t i = 0; i < t.parts * part; ++i) from[i] = -std::numeric_limits<C>::infinity();
    for (int64_t p = 0; p < a.h.stride; ++p)
      for (int64_t r = 0; r < rows + t.more; ++r)
        if (const int64_t ih = a.h.start[h] + r * a.h.stride + p; ih >= 0 && ih < a.h.in)
          put_row(a, plane + ih * a.w.in, from + p * a.w.stride * part + r * t.width, part, t.width);
    for (int64_t r = 0; r < rows; ++r)  // a window of -inf has its first pixel
      for (int64_t o = 0; o < t.width; ++o)
        where[r * t.width + o] = static_cast<L>(a.h.first[h + r] * a.w.window + a.w.first[lesser(o, a.w.out - 1)]);
    for (int64_t i = 0; i < count; ++i) best[i] = -std::numeric_limits<C>::infinity();
    for (int64_t i = 0; i < count; i += kBlock)
      for (int64_t kh = 0; kh < a.h.window; ++kh)
        for (int64_t kw = 0; kw < a.w.window; ++kw) {
          const int64_t down = kh * a.h.dilation, right = kw * a.w.dilation;
          const C* seen = from + (down % a.h.stride * a.w.stride + right % a.w.stride) * part +
                          down / a.h.stride * t.width + right / a.w.stride;
          take(seen + i, 1, best + i, where + i, static_cast<L>(kh * a.w.window + kw), lesser(kBlock, count - i));
        }
    for (int64_t r = 0; r < rows; ++r, ++index) {
      narrow(best + r * t.width, y + index * a.w.out, a.w.out);
      if (position) put_positions(where + r * t.width, position + index * a.w.out, a.w.out);
    }
  }
}

template <class T, class P>
void forward_channels_last(const PoolArgs& a, const T* x, T* y, P* position, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  using L = lane_t<C>;
  alignas(64) C best[kBlock];
  alignas(64) L where[kBlock];
  alignas(64) C converted[kBlock];
  for (int64_t index = begin; index < end; ++index) {
    const Row r = row_of(a, index);
    const T* image = x + r.plane * a.d.in * a.h.in * a.w.in * a.channels;
    for (int64_t ow = 0; ow < a.w.out; ++ow) {
      const int64_t out = (index * a.w.out + ow) * a.channels;
      const L first = static_cast<L>((a.d.first[r.d] * a.h.window + a.h.first[r.h]) * a.w.window + a.w.first[ow]);
      for (int64_t c = 0; c < a.channels; c += kBlock) {
        const int64_t n = lesser(kBlock, a.channels - c);
        for (int64_t i = 0; i < n; ++i) best[i] = -std::numeric_limits<C>::infinity(), where[i] = first;
        for (int64_t kd = a.d.first[r.d]; kd < a.d.last[r.d]; ++kd)
          for (int64_t kh = a.h.first[r.h]; kh < a.h.last[r.h]; ++kh)
            for (int64_t kw = a.w.first[ow]; kw < a.w.last[ow]; ++kw) {
              const int64_t id = a.d.start[r.d] + kd * a.d.dilation, ih = a.h.start[r.h] + kh * a.h.dilation,
                            iw = a.w.start[ow] + kw * a.w.dilation;
              const T* from = image + ((id * a.h.in + ih) * a.w.in + iw) * a.channels + c;
              const L at = static_cast<L>((kd * a.h.window + kh) * a.w.window + kw);
              if constexpr (std::is_same_v<T, C>) {
                take(from, 1, best, where, at, n);
              } else {
                widen(from, converted, n);
                take(static_cast<const C*>(converted), 1, best, where, at, n);
              }
            }
        narrow(best, y + out + c, n);
        if (position) put_positions(where, position + out + c, n);
      }
    }
  }
}

// How far an element of a window lies from the window's start, in pixels.
struct Offsets {
  const PoolArgs& a;
  int64_t table[kTable];
  bool tabled;

  explicit Offsets(const PoolArgs& args) : a(args), tabled(a.d.window * a.h.window * a.w.window <= kTable) {
    if (tabled)
      for (int64_t p = 0; p < a.d.window * a.h.window * a.w.window; ++p) table[p] = compute(p);
  }
  int64_t compute(int64_t p) const {
    const int64_t kw = p % a.w.window, kh = p / a.w.window % a.h.window, kd = p / (a.w.window * a.h.window);
    return (kd * a.d.dilation * a.h.in + kh * a.h.dilation) * a.w.in + kw * a.w.dilation;
  }
  int64_t operator[](int64_t p) const { return tabled ? table[p] : compute(p); }
};

template <class T>
inline void add(T& to, const T& grad) {
  from_compute(to_compute(to) + to_compute(grad), to);
}

template <class T, class P>
void backward_planar(const PoolArgs& a, const T* grad_y, const P* position, T* grad_x, int64_t begin, int64_t end) {
  const Offsets offsets(a);
  const int64_t in = a.d.in * a.h.in * a.w.in, out = a.d.out * a.h.out * a.w.out;
  for (int64_t plane = begin; plane < end; ++plane) {
    T* to = grad_x + plane * in;
    std::memset(static_cast<void*>(to), 0, in * sizeof(T));
    const T* g = grad_y + plane * out;
    const P* p = position + plane * out;
    for (int64_t od = 0; od < a.d.out; ++od)
      for (int64_t oh = 0; oh < a.h.out; ++oh) {
        const int64_t row = (a.d.start[od] * a.h.in + a.h.start[oh]) * a.w.in;
        if (offsets.tabled) {
          for (int64_t ow = 0; ow < a.w.out; ++ow) add(to[row + a.w.start[ow] + offsets.table[p[ow]]], g[ow]);
        } else {
          for (int64_t ow = 0; ow < a.w.out; ++ow) add(to[row + a.w.start[ow] + offsets.compute(p[ow])], g[ow]);
        }
        g += a.w.out, p += a.w.out;
      }
  }
}

template <class T, class P>
void backward_channels_last(const PoolArgs& a, int64_t blocks, const T* grad_y, const P* position, T* grad_x,
                            int64_t begin, int64_t end) {
  using C = compute_t<T>;
  using L = lane_t<C>;
  alignas(64) C grad[kBlock];
  alignas(64) L where[kBlock];
  alignas(64) C sum[kBlock];
  const Offsets offsets(a);
  const bool select = a.d.window * a.h.window * a.w.window <= kSelect;
  const int64_t rows = a.d.in * a.h.in;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t image = unit / blocks, c0 = unit % blocks * a.channels / blocks,
                  c1 = (unit % blocks + 1) * a.channels / blocks;
    T* to = grad_x + image * rows * a.w.in * a.channels;
    int64_t zeroed = 0;  // rows that are set to zero so far: just ahead of their use, while they are in the cache
    auto zero_to = [&](int64_t row) {
      for (; zeroed < row; ++zeroed) {
        T* line = to + zeroed * a.w.in * a.channels;
        if (blocks == 1)
          std::memset(static_cast<void*>(line), 0, a.w.in * a.channels * sizeof(T));
        else
          for (int64_t w = 0; w < a.w.in; ++w)
            std::memset(static_cast<void*>(line + w * a.channels + c0), 0, (c1 - c0) * sizeof(T));
      }
    };
    for (int64_t od = 0; od < a.d.out; ++od)
      for (int64_t oh = 0; oh < a.h.out; ++oh) {
        zero_to((a.d.start[od] + (a.d.last[od] - 1) * a.d.dilation) * a.h.in + a.h.start[oh] +
                (a.h.last[oh] - 1) * a.h.dilation + 1);
        for (int64_t ow = 0; ow < a.w.out; ++ow) {
          const int64_t pixel = (a.d.start[od] * a.h.in + a.h.start[oh]) * a.w.in + a.w.start[ow];
          const int64_t out = (((image * a.d.out + od) * a.h.out + oh) * a.w.out + ow) * a.channels;
          if (!select) {
            for (int64_t c = c0; c < c1; ++c)
              add(to[(pixel + offsets[position[out + c]]) * a.channels + c], grad_y[out + c]);
            continue;
          }
          for (int64_t c = c0; c < c1; c += kBlock) {
            const int64_t n = lesser(kBlock, c1 - c);
            widen(grad_y + out + c, grad, n);
            for (int64_t i = 0; i < n; ++i) where[i] = static_cast<L>(position[out + c + i]);
            for (int64_t kd = a.d.first[od]; kd < a.d.last[od]; ++kd)
              for (int64_t kh = a.h.first[oh]; kh < a.h.last[oh]; ++kh)
                for (int64_t kw = a.w.first[ow]; kw < a.w.last[ow]; ++kw) {
                  const int64_t p = (kd * a.h.window + kh) * a.w.window + kw;
                  const L at = static_cast<L>(p);
                  T* line = to + (pixel + offsets.table[p]) * a.channels + c;
                  if constexpr (std::is_same_v<T, C>) {
                    for (int64_t i = 0; i < n; ++i) line[i] += where[i] == at ? grad[i] : C(0);
                  } else {
                    widen(line, sum, n);
                    for (int64_t i = 0; i < n; ++i) sum[i] += where[i] == at ? grad[i] : C(0);
                    narrow(sum, line, n);
                  }
                }
          }
        }
      }
    zero_to(rows);
  }
}

// Calls f with null pointers of the element's and the position's type.
template <class F>
void with_types(const PoolArgs& a, const F& f) {
  with_dtype(a.dtype, [&](auto* of) {
    if (a.position_bytes == 1) return f(of, static_cast<uint8_t*>(nullptr));
    if (a.position_bytes == 2) return f(of, static_cast<uint16_t*>(nullptr));
    f(of, static_cast<uint32_t*>(nullptr));
  });
}

void forward(const PoolArgs& a, const void* x, void* y, void* position, int64_t begin, int64_t end) {
  with_types(a, [&](auto* of, auto* position_of) {
    using T = std::remove_pointer_t<decltype(of)>;
    using P = std::remove_pointer_t<decltype(position_of)>;
    auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    auto* positions = static_cast<P*>(position);
    if (a.channels_last)
      forward_channels_last(a, from, to, positions, begin, end);
    else if (const Together together(a); together.fits(a))
      forward_planar_together(a, together, from, to, positions, begin, end);
    else
      forward_planar(a, from, to, positions, begin, end);
  });
}

void backward(const PoolArgs& a, int64_t blocks, const void* grad_y, const void* position, void* grad_x, int64_t begin,
              int64_t end) {
  with_types(a, [&](auto* of, auto* position_of) {
    using T = std::remove_pointer_t<decltype(of)>;
    using P = std::remove_pointer_t<decltype(position_of)>;
    auto* from = static_cast<const T*>(grad_y);
    auto* positions = static_cast<const P*>(position);
    auto* to = static_cast<T*>(grad_x);
    if (a.channels_last)
      backward_channels_last(a, blocks, from, positions, to, begin, end);
    else
      backward_planar(a, from, positions, to, begin, end);
  });
}

}  // namespace

extern const PoolKernels pool_kernels_table;
const PoolKernels pool_kernels_table = {forward, backward};

}  // namespace tsmem::TSMEM_ISA
