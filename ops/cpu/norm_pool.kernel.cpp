#include "cpu/norm.h"
#include "cpu/norm_chunks.h"
#include "cpu/norm_fused.h"

namespace tsmem::TSMEM_ISA {
namespace {

// Integers as wide as the floats beside them, so that comparisons of one select the other in vectors.
template <class A>
using Index = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

inline int64_t read_position(const NormPoolArgs& a, int64_t i) {
  switch (a.position_bytes) {
    case 1:
      return static_cast<const uint8_t*>(a.positions)[i];
    case 2:
      return static_cast<const uint16_t*>(a.positions)[i];
    default:
      return static_cast<const int32_t*>(a.positions)[i];
  }
}

template <class I>
inline void write_positions(const NormPoolArgs& a, int64_t at, const I* __restrict from, int64_t n) {
  if (a.position_bytes == 1) {
    uint8_t* to = static_cast<uint8_t*>(a.positions) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(from[i]);
  } else if (a.position_bytes == 2) {
    uint16_t* to = static_cast<uint16_t*>(a.positions) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(from[i]);
  } else {
    int32_t* to = static_cast<int32_t*>(a.positions) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int32_t>(from[i]);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
inline int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// The first tap of a window that lies inside the map: where PyTorch starts, and what stays if all values are -inf.
inline int64_t first_tap(int64_t start, int64_t dilation) { return start < 0 ? ceil_div(-start, dilation) : 0; }

// Rows of the input that are worked on at once, with room for `elements` in scratch memory, at least `least`.
inline int64_t band_rows(int64_t row_elements, int64_t elements, int64_t least) {
  return at_least(elements / row_elements, least);
}

// The part of `norm` that is input rows [h0, h1) of plane (planar: image * channels + channel) or image p.
inline NormRange rows_range(const NormPoolArgs& a, int64_t p, int64_t h0, int64_t h1) {
  const int64_t base = p * a.height;
  return {(base + h0) * a.width, (base + h1) * a.width, 0, a.norm.channels};
}

// Calls f(chunk, range) for chunks of input rows [h0, h1) of plane or image p.
template <class F>
inline void band_chunks(const NormPoolArgs& a, int64_t p, int64_t h0, int64_t h1, F f) {
  if (a.rows) {
    const NormRange r = rows_range(a, p, h0, h1);
    row_chunks(a.norm, r, r.o0 * a.norm.channels, [&](const Chunk& k) { f(k, r); });
    return;
  }
  const int64_t c = p % a.norm.channels, begin = (p * a.height + h0) * a.width, end = (p * a.height + h1) * a.width;
  const NormRange r{0, 1, c, c + 1};
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t n = at_most(kChunk, end - i);
    f(Chunk{i, n, 0, 1, n, 0, 0, 0}, r);
  }
}

// Values that win over `best`: larger ones, and NaN always, so that the first of equals and the last NaN stay.
template <class A, class I, int64_t step>
inline void take_row(const A* __restrict from, int64_t stride, A* __restrict best, I* __restrict tap, I t, int64_t n) {
  const int64_t s = step ? step : stride;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const A v = from[i * s];
    const bool wins = (v > best[i]) | (v != v);
    best[i] = wins ? v : best[i];
    tap[i] = wins ? t : tap[i];
  }
}
template <class A, class I>
inline void take(const A* from, int64_t stride, A* best, I* tap, I t, int64_t n) {
  if (stride == 1)
    take_row<A, I, 1>(from, 1, best, tap, t, n);
  else if (stride == 2)
    take_row<A, I, 2>(from, 2, best, tap, t, n);
  else
    take_row<A, I, 0>(from, stride, best, tap, t, n);
}

// Elements 0, step, 2 step, ... of x, step 1 or 2.
template <int64_t step>
inline __attribute__((always_inline)) Vec load_step(const float* x) {
  const Vec low = load_vec(x);
  if (step == 1) return low;
  const Vec high = load_vec(x + kLanes - 1);  // its last lane is the last that is needed
#if defined(__AVX512F__)
  const VecBits even = {0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31};
  return reinterpret_cast<Vec>(_mm512_permutex2var_ps(reinterpret_cast<__m512>(low), reinterpret_cast<__m512i>(even),
                                                      reinterpret_cast<__m512>(high)));
#elif defined(__AVX2__)
  const __m256 mixed = _mm256_shuffle_ps(reinterpret_cast<__m256>(low), reinterpret_cast<__m256>(high), 0b11011000);
  return reinterpret_cast<Vec>(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0b11011000));
#else
  Vec v;
  for (int64_t i = 0; i < kLanes / 2; ++i) v[i] = low[2 * i], v[kLanes / 2 + i] = high[2 * i + 1];
  return v;
#endif
}

// take() of a window's taps for `n` >= kLanes windows in a row that lie inside the map at all columns: the winners so
// far stay in registers. lines: input rows `first` to `last` - 1 of the windows, each from the first window's first
// tap.
template <int64_t step>
inline void take_windows(const float* const* lines, int64_t first, int64_t last, int64_t columns, int64_t dilation,
                         float* best, int32_t* tap, int64_t n) {
  const auto start = static_cast<int32_t>(first * columns);
  for (int64_t at = 0; at < n; at += kLanes) {
    const int64_t i = at + kLanes <= n ? at : n - kLanes;
    Vec most = all(-__builtin_inff());
    VecBits where = VecBits{} + start;
    int32_t t = start;
    for (int64_t h = first; h < last; ++h)
      for (int64_t w = 0; w < columns; ++w, ++t) {
        const Vec v = load_step<step>(lines[h] + i * step + w * dilation);
        const VecBits wins = (v > most) | (v != v);
        most = wins ? v : most;
        where = wins ? VecBits{} + t : where;
      }
    store_vec(most, best + i);
    std::memcpy(tap + i, &where, sizeof(VecBits));
  }
}

template <class T>
void pool_forward(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  using A = compute_t<T>;
  using I = Index<A>;
  const NormArgs& norm = a.norm;
  const int64_t C = norm.channels, row = a.rows ? a.width * C : a.width,
                out_row = a.rows ? a.out_width * C : a.out_width;
  const int64_t reach = (a.kernel[0] - 1) * a.dilation[0] + 1;
  // Bands overlap by reach - stride rows, which are computed twice: several output rows a band keep that small.
  const int64_t rows = band_rows(row, a.rows ? 65536 : 8192, reach), block = (rows - reach) / a.stride[0] + 1;
  Scratch<A> band(at_most(rows, a.height) * row), best(out_row);
  Scratch<I> tap(out_row);
  Scratch<const A*> lines(a.kernel[0]);
  // Windows [in0, in1) of a row lie inside the map at all columns.
  const int64_t in0 = ceil_div(a.padding[1], a.stride[1]),
                in1 =
                    at_most(a.out_width,
                            floor_div(a.width - 1 - (a.kernel[1] - 1) * a.dilation[1] + a.padding[1], a.stride[1]) + 1);
  const bool vectors = !a.rows && in1 - in0 >= kLanes && (a.stride[1] == 1 || a.stride[1] == 2);
  Buffers<A> b;
  for (int64_t p = p0; p < p1; ++p)
    for (int64_t oh0 = 0; oh0 < a.out_height; oh0 += block) {
      const int64_t oh1 = at_most(oh0 + block, a.out_height);
      const int64_t h0 = at_least(0, oh0 * a.stride[0] - a.padding[0]);
      const int64_t h1 = at_most(a.height, (oh1 - 1) * a.stride[0] - a.padding[0] + reach);
      const int64_t origin = (p * a.height + h0) * row;
      if (h1 > h0)
        band_chunks(a, p, h0, h1, [&](const Chunk& k, const NormRange& r) {
          const A* x = load(static_cast<const T*>(norm.x) + k.offset, b.x, k.n);
          A* y = band.data + (k.offset - origin);
          affine(norm, r, k, x, y, a.rows);
          act_forward(y, k.n, norm.act);
          if constexpr (sizeof(T) != sizeof(A)) {  // PyTorch compares rounded values
            T rounded[kChunk];
            narrow(y, rounded, k.n);
            widen(rounded, y, k.n);
          }
        });
      for (int64_t oh = oh0; oh < oh1; ++oh) {
        const int64_t top = oh * a.stride[0] - a.padding[0], first_h = first_tap(top, a.dilation[0]);
        for (int64_t i = 0; i < out_row; ++i) best[i] = -__builtin_inff();
        for (int64_t ow = 0; ow < a.out_width; ++ow) {
          const I t = static_cast<I>(first_h * a.kernel[1] + first_tap(ow * a.stride[1] - a.padding[1], a.dilation[1]));
          if (a.rows)
            for (int64_t c = 0; c < C; ++c) tap[ow * C + c] = t;
          else
            tap[ow] = t;
        }
        bool inner = false;
        if constexpr (std::is_same_v<A, float>)
          if (vectors) {
            int64_t last_h = first_h;
            for (; last_h < a.kernel[0] && top + last_h * a.dilation[0] < a.height; ++last_h)
              lines[last_h] = band.data + (top + last_h * a.dilation[0] - h0) * row + in0 * a.stride[1] - a.padding[1];
            inner = last_h > first_h;
            if (inner && a.stride[1] == 1)
              take_windows<1>(lines.data, first_h, last_h, a.kernel[1], a.dilation[1], best.data + in0, tap.data + in0,
                              in1 - in0);
            else if (inner)
              take_windows<2>(lines.data, first_h, last_h, a.kernel[1], a.dilation[1], best.data + in0, tap.data + in0,
                              in1 - in0);
          }
        for (int64_t kh = first_h; kh < a.kernel[0]; ++kh) {
          const int64_t h = top + kh * a.dilation[0];
          if (h >= a.height) break;
          const A* line = band.data + (h - h0) * row;
          for (int64_t kw = 0; kw < a.kernel[1]; ++kw) {
            const int64_t shift = kw * a.dilation[1] - a.padding[1];
            const I t = static_cast<I>(kh * a.kernel[1] + kw);
            const int64_t w0 = at_least(0, ceil_div(-shift, a.stride[1]));
            const int64_t w1 = at_most(a.out_width, floor_div(a.width - 1 - shift, a.stride[1]) + 1);
            const auto some = [&](int64_t from, int64_t to) {
              if (to > from)
                take(line + from * a.stride[1] + shift, a.stride[1], best.data + from, tap.data + from, t, to - from);
            };
            if (a.rows) {
              for (int64_t ow = w0; ow < w1; ++ow)
                take(line + (ow * a.stride[1] + shift) * C, 1, best.data + ow * C, tap.data + ow * C, t, C);
            } else if (inner) {
              some(w0, at_most(w1, in0));
              some(at_least(w0, in1), w1);
            } else {
              some(w0, w1);
            }
          }
        }
        const int64_t at = (p * a.out_height + oh) * out_row;
        T* out = static_cast<T*>(norm.out) + at;
        if constexpr (sizeof(T) == sizeof(A))
          std::memcpy(out, best.data, out_row * sizeof(T));
        else
          narrow(best.data, out, out_row);
        if (a.positions) write_positions(a, at, tap.data, out_row);
      }
    }
}

// Where the tap of each position lies, relative to its window's first.
struct Taps {
  Scratch<int32_t> h, w;
  explicit Taps(const NormPoolArgs& a) : h(a.kernel[0] * a.kernel[1]), w(a.kernel[0] * a.kernel[1]) {
    for (int64_t i = 0; i < a.kernel[0]; ++i)
      for (int64_t j = 0; j < a.kernel[1]; ++j) {
        h[i * a.kernel[1] + j] = static_cast<int32_t>(i * a.dilation[0]);
        w[i * a.kernel[1] + j] = static_cast<int32_t>(j * a.dilation[1]);
      }
  }
};

// --- Channels last: vectors of channels ---

// Windows that each of n positions along a dimension lies in, in order, and as which tap: entries [first[i], first[i +
// 1]) of window and tap are those of position i.
struct Cover {
  Scratch<int32_t> first, window, tap;
  Cover(const NormPoolArgs& a, int d, int64_t n, int64_t windows)
      : first(n + 1), window(n * a.kernel[d]), tap(n * a.kernel[d]) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i + a.padding[d];
      for (int64_t o = at_least(0, ceil_div(at - (a.kernel[d] - 1) * a.dilation[d], a.stride[d]));
           o < windows && o * a.stride[d] <= at; ++o)
        if ((at - o * a.stride[d]) % a.dilation[d] == 0) {
          window[count] = static_cast<int32_t>(o);
          tap[count++] = static_cast<int32_t>((at - o * a.stride[d]) / a.dilation[d]);
        }
      first[i + 1] = count;
    }
  }
};

// Whether maps have the vectors that follow: positions of a byte, and channels that fill one.
inline bool channel_vectors(const NormPoolArgs& a) {
  return a.rows && a.position_bytes == 1 && a.norm.channels >= kLanes;
}

// The taps that won the windows of a vector of channels.
inline __attribute__((always_inline)) VecBits winners(const uint8_t* positions) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(positions));
  return reinterpret_cast<VecBits>(_mm512_maskz_cvtepu8_epi32(0xFFFF, bytes));
#elif defined(__AVX2__)
  return reinterpret_cast<VecBits>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(positions))));
#else
  VecBits won;
  for (int64_t i = 0; i < kLanes; ++i) won[i] = positions[i];
  return won;
#endif
}

// The bits of v where `won` is `tap`, else 0. v is loaded at once: as a masked load it would wait for the positions.
inline __attribute__((always_inline)) VecBits where(VecBits won, int32_t tap, Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return reinterpret_cast<VecBits>(v) & (won == VecBits{} + tap);
}

// The sums of the gradient before the activation (sum, dot), or the gradient of x: of each input pixel from the windows
// that it lies in. The last vector of channels overlaps the one before.
template <class T, bool sums, bool through_stats, class Fused>
[[gnu::noinline]] void pool_rows_backward(const NormPoolArgs& a, int64_t p0, int64_t p1, const Fused act, double* sum,
                                          double* dot) {
  const NormArgs& norm = a.norm;
  const int64_t C = norm.channels;
  Cover rows(a, 0, a.height, a.out_height), columns(a, 1, a.width, a.out_width);
  Scratch<int64_t> start(a.kernel[0] * a.kernel[1]);
  Scratch<int32_t> tap(a.kernel[0] * a.kernel[1]);
  Scratch<float> s_run(C), q_run(C);
  const uint8_t* positions = static_cast<const uint8_t*>(a.positions);
  const T *grad = static_cast<const T*>(norm.grad), *x = static_cast<const T*>(norm.x);
  T* out = static_cast<T*>(norm.out);
  const bool stream = !sums && streams(norm, out, C);
  for (int64_t p = p0; p < p1; ++p)
    for (int64_t h = 0; h < a.height; ++h)
      for (int64_t w = 0; w < a.width; ++w) {
        int64_t windows = 0;
        for (int32_t i = rows.first[h]; i < rows.first[h + 1]; ++i)
          for (int32_t j = columns.first[w]; j < columns.first[w + 1]; ++j, ++windows) {
            start[windows] = ((p * a.out_height + rows.window[i]) * a.out_width + columns.window[j]) * C;
            tap[windows] = static_cast<int32_t>(rows.tap[i] * a.kernel[1] + columns.tap[j]);
          }
        const int64_t at = ((p * a.height + h) * a.width + w) * C;
        for (int64_t i = 0; i < C; i += kLanes) {
          const int64_t c = i + kLanes <= C ? i : C - kLanes;
          Vec g = {};
          for (int64_t k = 0; k < windows; ++k)
            g += reinterpret_cast<Vec>(where(winners(positions + start[k] + c), tap[k], load_vec(grad + start[k] + c)));
          const Vec d = load_vec(x + at + c) - load_vec(floats(norm.mean) + c);
          g = act.backward(act.flags(d * load_vec(floats(norm.scale) + c) + load_vec(floats(norm.bias) + c)), g);
          if (sums) {
            if (c < i) drop_first<float>(g, i - c);
            store_vec(load_vec(s_run.data + c) + g, s_run.data + c);
            store_vec(load_vec(q_run.data + c) + g * d, q_run.data + c);
            continue;
          }
          g *= load_vec(floats(norm.slope) + c);
          if (through_stats) g -= d * load_vec(floats(norm.tilt) + c) + load_vec(floats(norm.level) + c);
          put_vec(stream, g, out + at + c);
        }
        if (sums && (w % kRowsPerFlush == kRowsPerFlush - 1 || w + 1 == a.width))
          for (int64_t c = 0; c < C; ++c) sum[c] += s_run[c], dot[c] += q_run[c], s_run[c] = q_run[c] = 0;
      }
  if (!sums) end_stream(norm);
}

// The pooled output from its positions: of each window the tap that won.
template <class T, class Fused>
[[gnu::noinline]] void pool_rows_again(const NormPoolArgs& a, int64_t p0, int64_t p1, const Fused act) {
  const NormArgs& norm = a.norm;
  const int64_t C = norm.channels;
  const T* x = static_cast<const T*>(norm.x);
  Scratch<int64_t> start(a.kernel[0] * a.kernel[1]);
  Scratch<int32_t> tap(a.kernel[0] * a.kernel[1]);
  for (int64_t p = p0; p < p1; ++p)
    for (int64_t oh = 0; oh < a.out_height; ++oh)
      for (int64_t ow = 0; ow < a.out_width; ++ow) {
        const int64_t top = oh * a.stride[0] - a.padding[0], left = ow * a.stride[1] - a.padding[1];
        int64_t taps = 0;
        for (int64_t kh = first_tap(top, a.dilation[0]); kh < a.kernel[0]; ++kh)
          for (int64_t kw = first_tap(left, a.dilation[1]); kw < a.kernel[1]; ++kw) {
            const int64_t h = top + kh * a.dilation[0], w = left + kw * a.dilation[1];
            if (h >= a.height || w >= a.width) continue;
            start[taps] = ((p * a.height + h) * a.width + w) * C;
            tap[taps++] = static_cast<int32_t>(kh * a.kernel[1] + kw);
          }
        const int64_t at = ((p * a.out_height + oh) * a.out_width + ow) * C;
        for (int64_t i = 0; i < C; i += kLanes) {
          const int64_t c = i + kLanes <= C ? i : C - kLanes;
          const VecBits won = winners(static_cast<const uint8_t*>(a.positions) + at + c);
          VecBits bits = {};
          for (int64_t k = 0; k < taps; ++k) bits |= where(won, tap[k], load_vec(x + start[k] + c));
          const Vec m = load_vec(floats(norm.mean) + c), s = load_vec(floats(norm.scale) + c),
                    b = load_vec(floats(norm.bias) + c);
          store_vec(act.forward((reinterpret_cast<Vec>(bits) - m) * s + b), static_cast<T*>(norm.out) + at + c);
        }
      }
}

template <class T>
void pool_reduce(const NormPoolArgs& a, int64_t p0, int64_t p1, double* sum, double* dot) {
  using A = compute_t<T>;
  const NormArgs& norm = a.norm;
  if constexpr (fusable<T>)
    if (channel_vectors(a) &&
        with_fused(norm, [&](auto act) { pool_rows_backward<T, true, false>(a, p0, p1, act, sum, dot); }))
      return;
  const int64_t C = norm.channels, lanes = a.rows ? C : 1;
  const T *x = static_cast<const T*>(norm.x), *grad = static_cast<const T*>(norm.grad);
  Taps taps(a);
  Buffers<A> b;
  alignas(64) T taken[kChunk];
  alignas(64) A g[kChunk];
  Scratch<A> s(lanes), q(lanes);
  const A* mean = static_cast<const A*>(norm.mean);
  // Common maps in vectors: indices of 32 bits.
  const int64_t window = a.kernel[0] * a.kernel[1];
  const bool vectors = !a.rows && a.position_bytes == 1 && a.height * a.width < (int64_t{1} << 30);
  Scratch<int32_t> near(window);
  for (int64_t t = 0; vectors && t < window; ++t) near[t] = static_cast<int32_t>(taps.h[t] * a.width + taps.w[t]);
  // Takes the inputs that won for outputs [at, at + n), which are of channels c, c + 1, ... (rows) or of channel c.
  auto chunk = [&](int64_t p, int64_t at, int64_t n, int64_t c) {
    const int64_t pixel = at / lanes - p * a.out_height * a.out_width;
    int64_t oh = pixel / a.out_width, ow = pixel % a.out_width;
    for (int64_t i = 0; vectors && i < n; ow = 0, ++oh) {
      const T* plane = x + p * a.height * a.width;
      const uint8_t* won = static_cast<const uint8_t*>(a.positions) + at + i;
      const int64_t top = oh * a.stride[0] - a.padding[0], left = ow * a.stride[1] - a.padding[1];
      const auto corner = static_cast<int32_t>(top * a.width + left), step = static_cast<int32_t>(a.stride[1]),
                 some = static_cast<int32_t>(at_most(n - i, a.out_width - ow));
      const int32_t* __restrict taps_at = near.data;
      T* __restrict to = taken + i;
      for (int32_t j = 0; j < some; ++j) to[j] = plane[corner + j * step + taps_at[won[j]]];
      i += some;
    }
    for (int64_t i = 0; !vectors && i < n; ++i) {
      const int64_t t = read_position(a, at + i);
      const int64_t h = oh * a.stride[0] - a.padding[0] + taps.h[t], w = ow * a.stride[1] - a.padding[1] + taps.w[t];
      if (!a.rows && ++ow == a.out_width) ow = 0, ++oh;
      const int64_t from = (p * a.height + h) * a.width + w;
      taken[i] = x[a.rows ? from * C + c + i : from];
    }
    const A* values = load(taken, b.x, n);
    const A* out_grad = load(grad + at, g, n);
    const Chunk k{0, n, a.rows ? c : 0, 1, n, 0, 0, 0};
    affine(norm, NormRange{0, 1, a.rows ? 0 : c, c + 1}, k, values, b.pre, a.rows);
    act_backward(b.pre, out_grad, g, n, norm.act);
    if (!a.rows) {
      dots(g, values, n, mean[c], &sum[c], &dot[c]);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      s[c + i] += g[i];
      q[c + i] += g[i] * (values[i] - mean[c + i]);
    }
  };
  const int64_t pixels = a.out_height * a.out_width;
  for (int64_t p = p0; p < p1; ++p) {
    if (!a.rows) {
      for (int64_t i = 0; i < pixels; i += kChunk) chunk(p, p * pixels + i, at_most(kChunk, pixels - i), p % C);
      continue;
    }
    for (int64_t i = 0; i < pixels; ++i) {
      for (int64_t c = 0; c < C; c += kChunk) chunk(p, (p * pixels + i) * C + c, at_most(kChunk, C - c), c);
      if ((i + 1) % kRowsPerFlush == 0 || i + 1 == pixels)
        for (int64_t c = 0; c < C; ++c) sum[c] += s[c], dot[c] += q[c], s[c] = q[c] = 0;
    }
  }
}

template <class T>
void pool_grad(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  using A = compute_t<T>;
  const NormArgs& norm = a.norm;
  if constexpr (fusable<T>)
    if (channel_vectors(a) && with_fused(norm, [&](auto act) {
          norm.tilt ? pool_rows_backward<T, false, true>(a, p0, p1, act, nullptr, nullptr)
                    : pool_rows_backward<T, false, false>(a, p0, p1, act, nullptr, nullptr);
        }))
      return;
  const int64_t C = norm.channels, lanes = a.rows ? C : 1, row = a.width * lanes, out_row = a.out_width * lanes;
  const int64_t reach = (a.kernel[0] - 1) * a.dilation[0] + 1, rows = band_rows(row, a.rows ? 65536 : 8192, 1);
  const T* grad = static_cast<const T*>(norm.grad);
  Taps taps(a);
  Scratch<A> band(at_most(rows, a.height) * row), line(out_row);
  Buffers<A> b;
  for (int64_t p = p0; p < p1; ++p)
    for (int64_t h0 = 0; h0 < a.height; h0 += rows) {
      const int64_t h1 = at_most(h0 + rows, a.height);
      for (int64_t i = 0; i < (h1 - h0) * row; ++i) band[i] = 0;
      // Output rows whose windows reach into the band.
      const int64_t first = at_least(0, ceil_div(h0 + a.padding[0] - reach + 1, a.stride[0]));
      const int64_t last = at_most(a.out_height - 1, floor_div(h1 - 1 + a.padding[0], a.stride[0]));
      for (int64_t oh = first; oh <= last; ++oh) {
        const int64_t at = (p * a.out_height + oh) * out_row, top = oh * a.stride[0] - a.padding[0];
        const A* g = load(grad + at, line.data, out_row);
        for (int64_t ow = 0; ow < a.out_width; ++ow) {
          const int64_t left = ow * a.stride[1] - a.padding[1];
          for (int64_t c = 0; c < lanes; ++c) {
            const int64_t t = read_position(a, at + ow * lanes + c), h = top + taps.h[t], w = left + taps.w[t];
            if (h >= h0 && h < h1 && w < a.width) band[((h - h0) * a.width + w) * lanes + c] += g[ow * lanes + c];
          }
        }
      }
      const int64_t origin = (p * a.height + h0) * row;
      band_chunks(a, p, h0, h1, [&](const Chunk& k, const NormRange& r) {
        const A* x = load(static_cast<const T*>(norm.x) + k.offset, b.x, k.n);
        A* g = band.data + (k.offset - origin);
        affine(norm, r, k, x, b.pre, a.rows);
        act_backward(b.pre, g, g, k.n, norm.act);
        T* out = static_cast<T*>(norm.out) + k.offset;
        A* to = target(out, b.pre);
        input_grad(norm, r, k, x, g, to, a.rows);
        store(to, out, k.n);
      });
    }
}

// The output of pool_forward from its positions: reads the taken elements alone.
template <class T>
void pool_again(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  using A = compute_t<T>;
  const NormArgs& norm = a.norm;
  if constexpr (fusable<T>)
    if (channel_vectors(a) && with_fused(norm, [&](auto act) { pool_rows_again<T>(a, p0, p1, act); })) return;
  const int64_t lanes = a.rows ? norm.channels : 1, out_row = a.out_width * lanes, plane = a.height * a.width * lanes;
  const A *mean = static_cast<const A*>(norm.mean), *scale = static_cast<const A*>(norm.scale),
          *bias = static_cast<const A*>(norm.bias);
  T* out = static_cast<T*>(norm.out);
  Taps taps(a);
  const int64_t window = a.kernel[0] * a.kernel[1];
  Scratch<int64_t> offset(window);
  for (int64_t t = 0; t < window; ++t) offset[t] = (taps.h[t] * a.width + taps.w[t]) * lanes;
  // Common maps in vectors: indices of 32 bits, coefficients of one channel.
  const bool vectors = !a.rows && a.position_bytes == 1 && plane < (int64_t{1} << 30);
  Scratch<int32_t> near(window);
  for (int64_t t = 0; vectors && t < window; ++t) near[t] = static_cast<int32_t>(offset[t]);
  Scratch<A> line(out_row);
  for (int64_t p = p0; p < p1; ++p) {
    const T* x = static_cast<const T*>(norm.x) + p * plane;
    const int64_t first = a.rows ? 0 : p % norm.channels;
    for (int64_t oh = 0; oh < a.out_height; ++oh) {
      const int64_t at = (p * a.out_height + oh) * out_row, top = oh * a.stride[0] - a.padding[0];
      const auto gather = [&](auto position) __attribute__((always_inline)) {
        for (int64_t ow = 0; ow < a.out_width; ++ow) {
          const int64_t corner = (top * a.width + ow * a.stride[1] - a.padding[1]) * lanes;
          for (int64_t c = 0; c < lanes; ++c) {
            A one[1];
            const A v = *load(x + corner + offset[position(at + ow * lanes + c)] + c, one, 1);
            line[ow * lanes + c] = (v - mean[first + c]) * scale[first + c] + bias[first + c];
          }
        }
      };
      if (vectors) {
        const uint8_t* taken = static_cast<const uint8_t*>(a.positions) + at;
        const auto corner = static_cast<int32_t>(top * a.width - a.padding[1]),
                   step = static_cast<int32_t>(a.stride[1]), n = static_cast<int32_t>(out_row);
        const int32_t* __restrict taps_at = near.data;
        A* __restrict to = line.data;
        const A m = mean[first], s = scale[first], b = bias[first];
        for (int32_t i = 0; i < n; ++i) to[i] = to_compute(x[corner + i * step + taps_at[taken[i]]]);
        for (int32_t i = 0; i < n; ++i) to[i] = (to[i] - m) * s + b;
      } else if (a.position_bytes == 1)
        gather([&](int64_t i) -> int64_t { return static_cast<const uint8_t*>(a.positions)[i]; });
      else
        gather([&](int64_t i) { return read_position(a, i); });
      act_forward(line.data, out_row, norm.act);
      if constexpr (std::is_same_v<T, A>)
        std::copy(line.data, line.data + out_row, out + at);
      else
        store(line.data, out + at, out_row);
    }
  }
}

void forward_any(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  with_dtype(a.norm.dtype, [&](auto* of) { pool_forward<std::remove_pointer_t<decltype(of)>>(a, p0, p1); });
}
void again_any(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  with_dtype(a.norm.dtype, [&](auto* of) { pool_again<std::remove_pointer_t<decltype(of)>>(a, p0, p1); });
}
void reduce_any(const NormPoolArgs& a, int64_t p0, int64_t p1, double* sum, double* dot) {
  with_dtype(a.norm.dtype, [&](auto* of) { pool_reduce<std::remove_pointer_t<decltype(of)>>(a, p0, p1, sum, dot); });
}
void grad_any(const NormPoolArgs& a, int64_t p0, int64_t p1) {
  with_dtype(a.norm.dtype, [&](auto* of) { pool_grad<std::remove_pointer_t<decltype(of)>>(a, p0, p1); });
}

}  // namespace

extern const NormPoolKernels norm_pool_kernels_table;
const NormPoolKernels norm_pool_kernels_table = {forward_any, again_any, reduce_any, grad_any};

}  // namespace tsmem::TSMEM_ISA
