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

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t VecBits __attribute__((vector_size(64)));
typedef uint16_t VecHalf __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;

inline __attribute__((always_inline)) Vec load_vec(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}
inline __attribute__((always_inline)) Vec load_vec(const bf16* x) {
  VecHalf h;
  std::memcpy(&h, x, sizeof(h));
  return reinterpret_cast<Vec>(__builtin_convertvector(h, VecBits) << 16);
}
inline __attribute__((always_inline)) void store_vec(Vec v, float* out) { std::memcpy(out, &v, sizeof(v)); }
inline __attribute__((always_inline)) void store_vec(Vec v, bf16* out) {
  typedef uint32_t Unsigned __attribute__((vector_size(64)));
  const Unsigned u = reinterpret_cast<Unsigned>(v), rounded = (u + (0x7FFFu + ((u >> 16) & 1u))) >> 16;
  const Unsigned nan = {0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u,
                        0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u, 0x7FC0u};
  const VecHalf h = __builtin_convertvector(v != v ? nan : rounded, VecHalf);
  std::memcpy(out, &h, sizeof(h));
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

inline __attribute__((always_inline)) Vec all(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

struct FusedIdentity {
  explicit FusedIdentity(const Act&) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p; }
  inline __attribute__((always_inline)) Vec backward(Vec, Vec g) const { return g; }
};
struct FusedRelu {
  explicit FusedRelu(const Act&) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p <= Vec{} ? Vec{} : p; }
  inline __attribute__((always_inline)) Vec backward(Vec p, Vec g) const { return p <= Vec{} ? Vec{} : g; }
};
struct FusedLeakyRelu {
  Vec slope;
  explicit FusedLeakyRelu(const Act& act) : slope(all(static_cast<float>(act.a))) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const { return p > Vec{} ? p : p * slope; }
  inline __attribute__((always_inline)) Vec backward(Vec p, Vec g) const { return p > Vec{} ? g : g * slope; }
};
struct FusedHardtanh {
  Vec low, high;
  explicit FusedHardtanh(const Act& act) : low(all(static_cast<float>(act.a))), high(all(static_cast<float>(act.b))) {}
  inline __attribute__((always_inline)) Vec forward(Vec p) const {
    const Vec q = p < low ? low : p;
    return q > high ? high : q;
  }
  inline __attribute__((always_inline)) Vec backward(Vec p, Vec g) const {
    const Vec q = p <= low ? Vec{} : g;
    return p >= high ? Vec{} : q;
  }
};

// Calls f with the fused activation and returns true, where there is one and nothing but x and the gradient is read.
template <class F>
inline bool with_fused(const NormArgs& a, F f) {
  if (a.other || a.mask || a.grad_other || !a.x) return false;
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

// --- Planar: a row has one mean, scale, ...
// -------------------------------------------------------------------------------------

// f(offset of a row, channel)
template <class F>
inline void planar_rows(const NormArgs& a, NormRange r, F f) {
  for (int64_t o = r.o0; o < r.o1; ++o)
    for (int64_t c = r.c0; c < r.c1; ++c) f((o * a.channels + c) * a.inner, c);
}

template <class T, class Fused>
void fused_apply_planar(const NormArgs& a, NormRange r, const Fused act) {
  planar_rows(a, r, [&](int64_t offset, int64_t c) {
    const T* x = static_cast<const T*>(a.x) + offset;
    T* out = static_cast<T*>(a.out) + offset;
    const Vec m = all(floats(a.mean)[c]), s = all(floats(a.scale)[c]), b = all(floats(a.bias)[c]);
    int64_t i = 0;
    for (; i + kLanes <= a.inner; i += kLanes) store_vec(act.forward((load_vec(x + i) - m) * s + b), out + i);
    if (i == a.inner) return;
    if (a.inner >= kLanes)  // the last vector overlaps the one before
      store_vec(act.forward((load_vec(x + a.inner - kLanes) - m) * s + b), out + a.inner - kLanes);
    else
      store_part(act.forward((load_part(x, a.inner, 0) - m) * s + b), out, a.inner);
  });
}

template <class T, class Fused>
void fused_reduce_planar(const NormArgs& a, NormRange r, const Fused act, double* sum, double* dot) {
  // Float sums of each channel, in lanes; they go to double before they are long.
  const int64_t channels = r.c1 - r.c0, row_vectors = (a.inner + kLanes - 1) / kLanes;
  Scratch<float> s_run(channels * kLanes), q_run(channels * kLanes);
  int64_t summed = 0;
  const auto flush = [&](int64_t c) {
    for (int64_t i = c * kLanes; i < (c + 1) * kLanes; ++i)
      sum[c] += s_run[i], dot[c] += q_run[i], s_run[i] = q_run[i] = 0;
  };
  for (int64_t o = r.o0; o < r.o1; ++o) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t offset = (o * a.channels + r.c0 + c) * a.inner;
      const T *x = static_cast<const T*>(a.x) + offset, *g = static_cast<const T*>(a.grad) + offset;
      const float mean = floats(a.mean)[r.c0 + c];
      const Vec m = all(mean), s = all(floats(a.scale)[r.c0 + c]), b = all(floats(a.bias)[r.c0 + c]);
      Vec s0 = load_vec(s_run.data + c * kLanes), q0 = load_vec(q_run.data + c * kLanes);
      for (int64_t i = 0; i < a.inner;) {
        const int64_t stop = i + kRowsPerFlush * kLanes < a.inner ? i + kRowsPerFlush * kLanes : a.inner;
        Vec s1 = {}, q1 = {};
        for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
          const Vec d0 = load_vec(x + i) - m, d1 = load_vec(x + i + kLanes) - m;
          const Vec g0 = act.backward(d0 * s + b, load_vec(g + i)),
                    g1 = act.backward(d1 * s + b, load_vec(g + i + kLanes));
          s0 += g0, s1 += g1;
          q0 += g0 * d0, q1 += g1 * d1;
        }
        for (; i < stop; i += kLanes) {
          const bool last = i + kLanes > a.inner, part = a.inner < kLanes;
          const int64_t from = last ? a.inner - kLanes : i;
          const Vec d = (part ? load_part(x, a.inner, mean) : load_vec(x + from)) - m;
          Vec gp = act.backward(d * s + b, part ? load_part(g, a.inner, 0) : load_vec(g + from));
          if (last && !part) drop_first<float>(gp, overlap<float>(i, a.inner));
          s0 += gp;
          q0 += gp * d;
        }
        i = stop;
        store_vec(s0 + s1, s_run.data + c * kLanes);
        store_vec(q0 + q1, q_run.data + c * kLanes);
        if (stop < a.inner) {
          flush(c);
          s0 = q0 = Vec{};
        }
      }
    }
    summed += row_vectors;
    if (summed >= kRowsPerFlush || o + 1 == r.o1) {
      for (int64_t c = 0; c < channels; ++c) flush(c);
      summed = 0;
    }
  }
}

template <class T, bool through_stats, class Fused>
void fused_grad_planar(const NormArgs& a, NormRange r, const Fused act) {
  planar_rows(a, r, [&](int64_t offset, int64_t c) {
    const T *x = static_cast<const T*>(a.x) + offset, *g = static_cast<const T*>(a.grad) + offset;
    T* out = static_cast<T*>(a.out) + offset;
    const Vec m = all(floats(a.mean)[c]), s = all(floats(a.scale)[c]), b = all(floats(a.bias)[c]),
              slope = all(floats(a.slope)[c]);
    const Vec tilt = all(through_stats ? floats(a.tilt)[c] : 0), level = all(through_stats ? floats(a.level)[c] : 0);
    const auto one = [&](Vec v, Vec gv) __attribute__((always_inline)) {
      const Vec d = v - m, gp = act.backward(d * s + b, gv) * slope;
      return through_stats ? gp - (d * tilt + level) : gp;
    };
    int64_t i = 0;
    for (; i + kLanes <= a.inner; i += kLanes) store_vec(one(load_vec(x + i), load_vec(g + i)), out + i);
    if (i == a.inner) return;
    const int64_t last = a.inner - kLanes;
    if (last >= 0)
      store_vec(one(load_vec(x + last), load_vec(g + last)), out + last);
    else
      store_part(one(load_part(x, a.inner, 0), load_part(g, a.inner, 0)), out, a.inner);
  });
}

// --- Rows: each lane of a period has its own
// ------------------------------------------------------------------------------------

constexpr int64_t kDeep = 4;  // periods that share one load of the coefficients

// f(first element, periods) for groups of at most kDeep whole periods; returns where the rest, less than a period,
// begins.
template <class F>
inline int64_t period_groups(const NormArgs& a, NormRange r, F f) {
  const int64_t begin = r.o0 * a.channels, periods = (r.o1 - r.o0) * a.channels / a.period;
  for (int64_t p = 0; p < periods; p += kDeep) f(begin + p * a.period, periods - p < kDeep ? periods - p : kDeep);
  return begin + periods * a.period;
}

template <class T, class Fused>
int64_t fused_apply_rows(const NormArgs& a, NormRange r, const Fused act) {
  return period_groups(a, r, [&](int64_t first, int64_t periods) {
    const T* x = static_cast<const T*>(a.x) + first;
    T* out = static_cast<T*>(a.out) + first;
    for (int64_t t = 0; t < a.period; t += kLanes) {
      const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t), b = load_vec(floats(a.bias) + t);
      for (int64_t p = 0; p < periods; ++p) {
        const int64_t i = p * a.period + t;
        store_vec(act.forward((load_vec(x + i) - m) * s + b), out + i);
      }
    }
  });
}

// sums and dots: of each lane of the period.
template <class T, class Fused>
int64_t fused_reduce_rows(const NormArgs& a, NormRange r, const Fused act, double* sums, double* dots_) {
  Scratch<float> s_run(a.period), q_run(a.period);
  int64_t summed = 0;
  const auto flush = [&] {
    for (int64_t i = 0; i < a.period; ++i) sums[i] += s_run[i], dots_[i] += q_run[i], s_run[i] = q_run[i] = 0;
    summed = 0;
  };
  const int64_t rest = period_groups(a, r, [&](int64_t first, int64_t periods) {
    const T *x = static_cast<const T*>(a.x) + first, *g = static_cast<const T*>(a.grad) + first;
    for (int64_t t = 0; t < a.period; t += kLanes) {
      const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t), b = load_vec(floats(a.bias) + t);
      Vec sum = load_vec(s_run.data + t), dot = load_vec(q_run.data + t);
      for (int64_t p = 0; p < periods; ++p) {
        const int64_t i = p * a.period + t;
        const Vec d = load_vec(x + i) - m, gp = act.backward(d * s + b, load_vec(g + i));
        sum += gp;
        dot += gp * d;
      }
      store_vec(sum, s_run.data + t);
      store_vec(dot, q_run.data + t);
    }
    if ((summed += periods) >= kRowsPerFlush) flush();
  });
  flush();
  return rest;
}

template <class T, bool through_stats, class Fused>
int64_t fused_grad_rows(const NormArgs& a, NormRange r, const Fused act) {
  return period_groups(a, r, [&](int64_t first, int64_t periods) {
    const T *x = static_cast<const T*>(a.x) + first, *g = static_cast<const T*>(a.grad) + first;
    T* out = static_cast<T*>(a.out) + first;
    for (int64_t t = 0; t < a.period; t += kLanes) {
      const Vec m = load_vec(floats(a.mean) + t), s = load_vec(floats(a.scale) + t), b = load_vec(floats(a.bias) + t);
      const Vec slope = load_vec(floats(a.slope) + t);
      Vec tilt = {}, level = {};
      if (through_stats) tilt = load_vec(floats(a.tilt) + t), level = load_vec(floats(a.level) + t);
      for (int64_t p = 0; p < periods; ++p) {
        const int64_t i = p * a.period + t;
        const Vec d = load_vec(x + i) - m, gp = act.backward(d * s + b, load_vec(g + i)) * slope;
        store_vec(through_stats ? gp - (d * tilt + level) : gp, out + i);
      }
    }
  });
}

}  // namespace
}  // namespace tsmem::TSMEM_ISA
