// The cheap activations in one loop, for float and bf16: what takes most of the time in common networks. Coefficients
// stay in registers over several rows, so that little but the map itself is loaded. Everything else goes through
// norm_chunks.h's buffers.
//
// Results are bit for bit those of the buffered way: the same operations in the same order for each element.
#pragma once
#include "cpu/norm_chunks.h"

// Vectors are passed between inlined functions only, so no calling convention is at stake.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace tsmem::TSMEM_ISA {
namespace {

template <class T>
constexpr bool fusable = __is_same(T, float) || __is_same(T, bf16);

typedef float Vec __attribute__((vector_size(kVecBytes)));
typedef int32_t VecBits __attribute__((vector_size(kVecBytes)));
typedef uint16_t VecHalf __attribute__((vector_size(kVecBytes / 2)));
constexpr int64_t kLanes = kVecBytes / 4;

inline __attribute__((always_inline)) Vec load_vec(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}
inline __attribute__((always_inline)) Vec load_vec(const bf16* x) {
  VecHalf h;
  std::memcpy(&h, x, sizeof(h));
#if defined(__AVX512F__)
  const VecBits wide = reinterpret_cast<VecBits>(_mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(h)));
#elif defined(__AVX2__)
  const VecBits wide = reinterpret_cast<VecBits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(h)));
#else
  const VecBits wide = __builtin_convertvector(h, VecBits);
#endif
  return reinterpret_cast<Vec>(wide << 16);
}
// The upper halves, rounded to nearest even.
inline __attribute__((always_inline)) VecHalf upper_halves(Vec v) {
  typedef uint32_t Unsigned __attribute__((vector_size(kVecBytes)));
  const Unsigned u = reinterpret_cast<Unsigned>(v), rounded = (u + (0x7FFFu + ((u >> 16) & 1u))) >> 16;
  const Unsigned bits = v != v ? Unsigned{} + 0x7FC0u : rounded;
#if defined(__AVX512F__)
  return reinterpret_cast<VecHalf>(_mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(bits)));
#elif defined(__AVX2__)
  const __m256i twice = _mm256_packus_epi32(reinterpret_cast<__m256i>(bits), reinterpret_cast<__m256i>(bits));
  return reinterpret_cast<VecHalf>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0b1000)));
#else
  return __builtin_convertvector(bits, VecHalf);
#endif
}
inline __attribute__((always_inline)) void store_vec(Vec v, float* out) { std::memcpy(out, &v, sizeof(v)); }
inline __attribute__((always_inline)) void store_vec(Vec v, bf16* out) {
  const VecHalf h = upper_halves(v);
  std::memcpy(out, &h, sizeof(h));
}
// Past the caches; out is aligned to the vector.
inline __attribute__((always_inline)) void stream_vec(Vec v, float* out) {
#if defined(__AVX512F__)
  _mm512_stream_ps(out, reinterpret_cast<__m512>(v));
#elif defined(__AVX2__)
  _mm256_stream_ps(out, reinterpret_cast<__m256>(v));
#else
  store_vec(v, out);
#endif
}
inline __attribute__((always_inline)) void stream_vec(Vec v, bf16* out) {
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(upper_halves(v)));
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(out), reinterpret_cast<__m128i>(upper_halves(v)));
#else
  store_vec(v, out);
#endif
}
template <class T>
inline __attribute__((always_inline)) void put_vec(bool stream, Vec v, T* out) {
  stream ? stream_vec(v, out) : store_vec(v, out);
}
// n < kLanes elements; the rest is `fill`.
template <class T>
inline __attribute__((always_inline)) Vec load_part(const T* x, int64_t n, float fill) {
  alignas(64) float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = fill;
  float converted[kLanes];
  const float* from = load(x, converted, n);
  for (int64_t i = 0; i < n; ++i) values[i] = from[i];
  return load_vec(values);
}
template <class T>
inline __attribute__((always_inline)) void store_part(Vec v, T* out, int64_t n) {
  T values[kLanes];
  store_vec(v, values);
  std::memcpy(out, values, n * sizeof(T));
}

inline __attribute__((always_inline)) Vec all(float x) { return x - Vec{}; }  // +, and -0 would be lost

// Bit i: lane i of a comparison.
inline __attribute__((always_inline)) uint32_t pack_lanes(VecBits flags) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(flags));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(flags)));
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(flags[i] & 1) << i;
  return bits;
#endif
}
inline __attribute__((always_inline)) VecBits unpack_lanes(uint32_t bits) {
  constexpr int32_t each[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  VecBits lane;
  std::memcpy(&lane, each, sizeof(lane));
  return ((VecBits{} + static_cast<int32_t>(bits)) & lane) != 0;
}
// The bits of elements [at, at + kLanes), at most up to n, of a row of masks.
inline __attribute__((always_inline)) uint32_t read_bits(const uint8_t* row, int64_t at, int64_t n) {
  uint32_t bits = 0;
  if (kLanes >= 8 && at % 8 == 0 && at + kLanes <= n) {
    std::memcpy(&bits, row + at / 8, kLanes / 8);
    return bits;
  }
  const int64_t end = at + kLanes < n ? at + kLanes : n;
  std::memcpy(&bits, row + at / 8, (end + 7) / 8 - at / 8);
  return bits >> (at % 8);
}
// The same of n elements, in order: `at` is a multiple of kLanes, which is 4 where vectors are short.
inline __attribute__((always_inline)) void write_bits(uint8_t* row, int64_t at, uint32_t bits, int64_t n) {
  if (kLanes < 8 && at % 8)
    row[at / 8] = static_cast<uint8_t>(row[at / 8] | bits << 4);
  else
    std::memcpy(row + at / 8, &bits, (n + 7) / 8);
}

// forward: of the pre-activation. flags: where the derivative is the upper slope. backward: the gradient times the
// slope.
struct FusedIdentity {
  explicit FusedIdentity(const Act&) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p; }
  inline __attribute__((always_inline)) VecBits flags(Vec p) const { return p == p; }
  inline __attribute__((always_inline)) Vec backward(VecBits, Vec g) const { return g; }
};
struct FusedRelu {
  explicit FusedRelu(const Act&) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p <= Vec{} ? Vec{} : p; }
  inline __attribute__((always_inline)) VecBits flags(Vec p) const { return ~(p <= Vec{}); }
  inline __attribute__((always_inline)) Vec backward(VecBits on, Vec g) const { return on ? g : Vec{}; }
};
struct FusedLeakyRelu {
  Vec slope;
  explicit FusedLeakyRelu(const Act& act) : slope(all(static_cast<float>(act.a))) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p > Vec{} ? p : p * slope; }
  inline __attribute__((always_inline)) VecBits flags(Vec p) const { return p > Vec{}; }
  inline __attribute__((always_inline)) Vec backward(VecBits on, Vec g) const { return on ? g : g * slope; }
};
struct FusedHardtanh {
  Vec low, high;
  explicit FusedHardtanh(const Act& act) : low(all(static_cast<float>(act.a))), high(all(static_cast<float>(act.b))) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const {
    const Vec q = p < low ? low : p;
    return q > high ? high : q;
  }
  inline __attribute__((always_inline)) VecBits flags(Vec p) const { return ~(p <= low) & ~(p >= high); }
  inline __attribute__((always_inline)) Vec backward(VecBits on, Vec g) const { return on ? g : Vec{}; }
};

// Calls f with the fused activation and returns true, where there is one.
template <class F>
inline bool with_fused(const NormArgs& a, F f) {
  if (!a.x) return false;
  switch (a.act.kind) {
    case ActKind::identity:
      f(FusedIdentity(a.act));
      return true;
    case ActKind::relu:
      f(FusedRelu(a.act));
      return true;
    case ActKind::leaky_relu:
      f(FusedLeakyRelu(a.act));
      return true;
    case ActKind::hardtanh:
      f(FusedHardtanh(a.act));
      return true;
    default:
      return false;
  }
}

inline const float* floats(const void* p) { return static_cast<const float*>(p); }

// Whether rows of n elements, the first at out, can be streamed: all vectors are aligned and whole.
template <class T>
inline bool streams(const NormArgs& a, const T* out, int64_t n) {
  return a.stream && n % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % (kLanes * sizeof(T)) == 0;
}

// Before other threads read what was streamed.
inline void end_stream([[maybe_unused]] const NormArgs& a) {
#if defined(__AVX2__)
  if (a.stream) _mm_sfence();
#endif
}

// The vector at i of act(pre + z), and its bits.
template <class T, class Fused>
inline __attribute__((always_inline)) void fused_apply_at(const T* x, const T* z, T* out, uint8_t* mask, int64_t i,
                                                          Vec m, Vec s, Vec b, const Fused& act, bool stream) {
  Vec p = (load_vec(x + i) - m) * s + b;
  if (z) p += load_vec(z + i);
  if (mask) write_bits(mask, i, pack_lanes(act.flags(p)), kLanes);
  put_vec(stream, act.forward(p), out + i);
}

// --- Planar: a row has one mean, scale, ... ---

template <class T, class Fused>
[[gnu::noinline]] void fused_apply_planar(const NormArgs& a, NormRange r, const Fused act) {
  const int64_t n = a.inner, mask_stride = (n + 7) / 8;
  const bool stream = streams(a, static_cast<const T*>(a.out), n);
  for (int64_t o = r.o0; o < r.o1; ++o)
    for (int64_t c = r.c0; c < r.c1; ++c) {
      const int64_t row = o * a.channels + c;
      const T *x = static_cast<const T*>(a.x) + row * n,
              *z = a.other ? static_cast<const T*>(a.other) + row * n : nullptr;
      T* out = static_cast<T*>(a.out) + row * n;
      uint8_t* mask = a.mask ? a.mask + row * mask_stride : nullptr;
      const Vec m = all(floats(a.mean)[c]), s = all(floats(a.scale)[c]), b = all(floats(a.bias)[c]);
      // The last vector overlaps the one before, if the row is long enough. out may be x or z: its part is read first.
      const bool part = n < kLanes;
      const int64_t from = part ? 0 : n - kLanes;
      Vec last = {};
      if (n % kLanes) {
        last = ((part ? load_part(x, n, 0) : load_vec(x + from)) - m) * s + b;
        if (z) last += part ? load_part(z, n, 0) : load_vec(z + from);
      }
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        fused_apply_at(x, z, out, mask, i, m, s, b, act, stream);
      }
      if (i == n) continue;
      if (mask) write_bits(mask, i, (pack_lanes(act.flags(last)) >> (i - from)) & ((1u << (n - i)) - 1), n - i);
      if (part)
        store_part(act.forward(last), out, n);
      else
        store_vec(act.forward(last), out + from);
    }
}

// The gradient before the activation where x - mean is d: by the mask, or by recomputing.
template <class Fused>
inline __attribute__((always_inline)) Vec fused_grad_pre(const Fused& act, const uint8_t* mask, int64_t at, int64_t n,
                                                         Vec d, Vec s, Vec b, Vec g) {
  return act.backward(mask ? unpack_lanes(read_bits(mask, at, n)) : act.flags(d * s + b), g);
}

// Mean and M2 of short rows: sums in lanes over several images, as a sum across lanes costs more than a row. They are
// of x - shift, the mean of the first row and then the mean so far, so that nothing cancels in M2.
template <class T>
[[gnu::noinline]] void fused_stats_planar(const NormArgs& a, NormRange r, double* mean, double* m2) {
  const int64_t channels = r.c1 - r.c0, n = a.inner, row_vectors = (n + kLanes - 1) / kLanes;
  Scratch<float> s_run(channels * kLanes), q_run(channels * kLanes), shift(channels);
  const auto row_of = [&](int64_t o, int64_t c) {
    return static_cast<const T*>(a.x) + (o * a.channels + r.c0 + c) * n;
  };
  const auto each = [&](const T* x, float from, auto f) __attribute__((always_inline)) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) f(load_vec(x + i) - from);
    if (i == n) return;
    if (n < kLanes) return f(load_part(x, n, from) - from);
    Vec d = load_vec(x + n - kLanes) - from;
    drop_first<float>(d, overlap<float>(i, n));
    f(d);
  };
  for (int64_t c = 0; c < channels; ++c) {
    mean[c] = m2[c] = 0;
    const T* x = row_of(r.o0, c);
    float first[1];
    const float from = *load(x, first, 1);
    Vec s = {};
    each(x, from, [&](Vec d) { s += d; });
    shift[c] = static_cast<float>(from + total<float>(s) / static_cast<double>(n));
  }
  int64_t done = r.o0;  // images in mean and m2
  for (int64_t o = r.o0; o < r.o1; ++o) {
    for (int64_t c = 0; c < channels; ++c) {
      Vec s = load_vec(s_run.data + c * kLanes), q = load_vec(q_run.data + c * kLanes);
      each(row_of(o, c), shift[c], [&](Vec d) {
        s += d;
        q += d * d;
      });
      store_vec(s, s_run.data + c * kLanes);
      store_vec(q, q_run.data + c * kLanes);
    }
    if (o + 1 < r.o1 && (o + 2 - done) * row_vectors <= kRowsPerFlush) continue;
    const auto m = static_cast<double>((o + 1 - done) * n);
    for (int64_t c = 0; c < channels; ++c) {
      const double s = total<float>(load_vec(s_run.data + c * kLanes)),
                   q = total<float>(load_vec(q_run.data + c * kLanes));
      merge(static_cast<double>((done - r.o0) * n), &mean[c], &m2[c], m, shift[c] + s / m, q - s * s / m);
      shift[c] = static_cast<float>(mean[c]);
      store_vec(Vec{}, s_run.data + c * kLanes);
      store_vec(Vec{}, q_run.data + c * kLanes);
    }
    done = o + 1;
  }
}

// plain: neither from a mask nor to grad_other.
template <class T, bool plain, class Fused>
[[gnu::noinline]] void fused_reduce_planar(const NormArgs& a, NormRange r, const Fused act, double* sum, double* dot) {
  // Float sums of each channel, in lanes; they go to double before they are long.
  const int64_t channels = r.c1 - r.c0, n = a.inner, row_vectors = (n + kLanes - 1) / kLanes, mask_stride = (n + 7) / 8;
  Scratch<float> s_run(channels * kLanes), q_run(channels * kLanes);
  int64_t summed = 0;
  const auto flush = [&](int64_t c) {
    float *s = s_run.data + c * kLanes, *q = q_run.data + c * kLanes;
    sum[c] += total<float>(load_vec(s)), dot[c] += total<float>(load_vec(q));
    store_vec(Vec{}, s);
    store_vec(Vec{}, q);
  };
  for (int64_t o = r.o0; o < r.o1; ++o) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t row = o * a.channels + r.c0 + c;
      const T *x = static_cast<const T*>(a.x) + row * n, *g = static_cast<const T*>(a.grad) + row * n;
      T* z = !plain && a.grad_other ? static_cast<T*>(a.grad_other) + row * n : nullptr;
      const uint8_t* mask = !plain && a.from_mask ? a.mask + row * mask_stride : nullptr;
      const float mean = floats(a.mean)[r.c0 + c];
      const Vec m = all(mean), s = all(floats(a.scale)[r.c0 + c]), b = all(floats(a.bias)[r.c0 + c]);
      Vec s0 = load_vec(s_run.data + c * kLanes), q0 = load_vec(q_run.data + c * kLanes);
      // The last vector overlaps the one before; z may be g, so it is read first.
      const Vec last_g = n > kLanes && n % kLanes ? load_vec(g + n - kLanes) : Vec{};
      for (int64_t i = 0; i < n;) {
        const int64_t stop = i + kRowsPerFlush * kLanes < n ? i + kRowsPerFlush * kLanes : n;
        Vec s1 = {}, q1 = {};
        for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
          const Vec d0 = load_vec(x + i) - m, d1 = load_vec(x + i + kLanes) - m;
          const Vec g0 = fused_grad_pre(act, mask, i, n, d0, s, b, load_vec(g + i));
          const Vec g1 = fused_grad_pre(act, mask, i + kLanes, n, d1, s, b, load_vec(g + i + kLanes));
          if (z) {
            store_vec(g0, z + i);
            store_vec(g1, z + i + kLanes);
          }
          s0 += g0, s1 += g1;
          q0 += g0 * d0, q1 += g1 * d1;
        }
        for (; i < stop; i += kLanes) {
          const bool last = i + kLanes > n, part = n < kLanes;
          const int64_t from = part ? 0 : last ? n - kLanes : i;
          const Vec d = (part ? load_part(x, n, mean) : load_vec(x + from)) - m;
          Vec gp = fused_grad_pre(act, mask, from, n, d, s, b,
                                  part   ? load_part(g, n, 0)
                                  : last ? last_g
                                         : load_vec(g + from));
          if (z && part) store_part(gp, z, n);
          if (z && !part) store_vec(gp, z + from);
          if (last && !part) drop_first<float>(gp, overlap<float>(i, n));
          s0 += gp;
          q0 += gp * d;
        }
        i = stop;
        s0 += s1, q0 += q1;
        if (stop < n) {
          store_vec(s0, s_run.data + c * kLanes);
          store_vec(q0, q_run.data + c * kLanes);
          flush(c);
          s0 = q0 = Vec{};
        }
      }
      store_vec(s0, s_run.data + c * kLanes);
      store_vec(q0, q_run.data + c * kLanes);
    }
    summed += row_vectors;
    if (summed >= kRowsPerFlush || o + 1 == r.o1) {
      for (int64_t c = 0; c < channels; ++c) flush(c);
      summed = 0;
    }
  }
}

template <class T, bool through_stats, class Fused>
[[gnu::noinline]] void fused_grad_planar(const NormArgs& a, NormRange r, const Fused act) {
  const int64_t n = a.inner, mask_stride = (n + 7) / 8;
  const bool stream = streams(a, static_cast<const T*>(a.out), n);
  for (int64_t o = r.o0; o < r.o1; ++o)
    for (int64_t c = r.c0; c < r.c1; ++c) {
      const int64_t row = o * a.channels + c;
      const T *x = static_cast<const T*>(a.x) + row * n, *g = static_cast<const T*>(a.grad) + row * n;
      T* out = static_cast<T*>(a.out) + row * n;
      const uint8_t* mask = a.from_mask ? a.mask + row * mask_stride : nullptr;
      const Vec m = all(floats(a.mean)[c]), s = all(floats(a.scale)[c]), b = all(floats(a.bias)[c]),
                slope = all(floats(a.slope)[c]);
      const Vec tilt = all(through_stats ? floats(a.tilt)[c] : 0), level = all(through_stats ? floats(a.level)[c] : 0);
      const auto one = [&](int64_t at, Vec v, Vec gv) __attribute__((always_inline)) {
        const Vec d = v - m, gp = fused_grad_pre(act, mask, at, n, d, s, b, gv) * slope;
        return through_stats ? gp - (d * tilt + level) : gp;
      };
      // The last vector overlaps the one before; out may be g, so it is read first.
      const int64_t last = n - kLanes;
      const Vec last_g = last > 0 && n % kLanes ? load_vec(g + last) : Vec{};
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) put_vec(stream, one(i, load_vec(x + i), load_vec(g + i)), out + i);
      if (i == n) continue;
      if (last >= 0)
        store_vec(one(last, load_vec(x + last), last_g), out + last);
      else
        store_part(one(0, load_part(x, n, 0), load_part(g, n, 0)), out, n);
    }
}

// --- Rows: each lane of a period has its own ---

constexpr int64_t kDeep = 4;     // periods that share one load of the coefficients
constexpr int64_t kWide = 1024;  // lanes of a period from which on rows are read one by one

// Of the next group: its rows are read in turns, a vector of each, which hardware does not foresee.
inline __attribute__((always_inline)) void fetch(const void* p) { __builtin_prefetch(p); }

// f(first element, periods, from, to) for lanes [from, to) of groups of at most kDeep whole periods, or one by one
// where a period fills a page: rows at its distance fall into one set of the L1 cache. The coefficients of kWide lanes
// fit into L1 beside the map. Returns where the rest, less than a period, begins.
template <class F>
inline int64_t period_groups(const NormArgs& a, NormRange r, F f) {
  const int64_t begin = r.o0 * a.channels, periods = (r.o1 - r.o0) * a.channels / a.period;
  if (a.period < kWide)
    for (int64_t p = 0; p < periods; p += kDeep)
      f(begin + p * a.period, periods - p < kDeep ? periods - p : kDeep, 0, a.period);
  else
    for (int64_t p0 = 0; p0 < periods; p0 += kRowsPerFlush)
      for (int64_t t = 0; t < a.period; t += kWide)
        for (int64_t p = p0; p < periods && p < p0 + kRowsPerFlush; ++p)
          f(begin + p * a.period, std::integral_constant<int64_t, 1>(), t, t + kWide < a.period ? t + kWide : a.period);
  return begin + periods * a.period;
}

template <class T, class Fused>
[[gnu::noinline]] int64_t fused_apply_rows(const NormArgs& a, NormRange r, const Fused act) {
  const bool stream = streams(a, static_cast<const T*>(a.out) + r.o0 * a.channels, a.period);
  return period_groups(
      a, r, [&](int64_t first, auto periods, int64_t from, int64_t to) __attribute__((always_inline)) {
        const T *x = static_cast<const T*>(a.x) + first,
                *z = a.other ? static_cast<const T*>(a.other) + first : nullptr;
        T* out = static_cast<T*>(a.out) + first;
        const int64_t period = a.period, n = periods * period;  // copies: stores to out could alias a's
        uint8_t* mask = a.mask ? a.mask + first / 8 : nullptr;
        for (int64_t t = from; t < to; t += kLanes) {
          const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t),
                    b = load_vec(floats(a.bias) + t);
          for (int64_t i = t; i < n; i += period) {
            fetch(x + i + n);
            fused_apply_at(x, z, out, mask, i, m, s, b, act, stream);
          }
        }
      });
}

// sums and dots: of each lane of the period. plain: as above.
template <class T, bool plain, class Fused>
[[gnu::noinline]] int64_t fused_reduce_rows(const NormArgs& a, NormRange r, const Fused act, double* sums,
                                            double* dots_) {
  Scratch<float> s_run(a.period), q_run(a.period);
  int64_t summed = 0;
  const auto flush = [&] {
    for (int64_t i = 0; i < a.period; ++i) {
      sums[i] += s_run[i], dots_[i] += q_run[i];
      s_run[i] = q_run[i] = 0;
    }
    summed = 0;
  };
  const int64_t rest = period_groups(
      a, r, [&](int64_t first, auto periods, int64_t from, int64_t to) __attribute__((always_inline)) {
        const T *x = static_cast<const T*>(a.x) + first, *g = static_cast<const T*>(a.grad) + first;
        T* z = !plain && a.grad_other ? static_cast<T*>(a.grad_other) + first : nullptr;
        const int64_t period = a.period, n = periods * period;
        const uint8_t* mask = !plain && a.from_mask ? a.mask + first / 8 : nullptr;
        for (int64_t t = from; t < to; t += kLanes) {
          const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t),
                    b = load_vec(floats(a.bias) + t);
          Vec sum = load_vec(s_run.data + t), dot = load_vec(q_run.data + t);
          for (int64_t i = t; i < n; i += period) {
            fetch(x + i + n), fetch(g + i + n);
            const Vec d = load_vec(x + i) - m, gp = fused_grad_pre(act, mask, i, n, d, s, b, load_vec(g + i));
            if (z) store_vec(gp, z + i);
            sum += gp;
            dot += gp * d;
          }
          store_vec(sum, s_run.data + t);
          store_vec(dot, q_run.data + t);
        }
        if (to == period && (summed += periods) >= kRowsPerFlush) flush();
      });
  flush();
  return rest;
}

template <class T, bool through_stats, bool masked, class Fused>
[[gnu::noinline]] int64_t fused_grad_rows(const NormArgs& a, NormRange r, const Fused act) {
  const bool stream = streams(a, static_cast<const T*>(a.out) + r.o0 * a.channels, a.period);
  return period_groups(
      a, r, [&](int64_t first, auto periods, int64_t from, int64_t to) __attribute__((always_inline)) {
        const T *x = static_cast<const T*>(a.x) + first, *g = static_cast<const T*>(a.grad) + first;
        T* out = static_cast<T*>(a.out) + first;
        const int64_t period = a.period, n = periods * period;  // copies: stores to out could alias a's
        const uint8_t* mask = masked ? a.mask + first / 8 : nullptr;
        for (int64_t t = from; t < to; t += kLanes) {
          const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t),
                    b = load_vec(floats(a.bias) + t);
          const Vec slope = load_vec(floats(a.slope) + t);
          Vec tilt = {}, level = {};
          if (through_stats) tilt = load_vec(floats(a.tilt) + t), level = load_vec(floats(a.level) + t);
          for (int64_t i = t; i < n; i += period) {
            fetch(x + i + n), fetch(g + i + n);
            const Vec d = load_vec(x + i) - m, gp = fused_grad_pre(act, mask, i, n, d, s, b, load_vec(g + i)) * slope;
            put_vec(stream, through_stats ? gp - (d * tilt + level) : gp, out + i);
          }
        }
      });
}

}  // namespace
}  // namespace tsmem::TSMEM_ISA
