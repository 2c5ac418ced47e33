#include "cpu/norm.h"

#include "cpu/norm_chunks.h"
#include "cpu/norm_fused.h"

namespace tsmem::TSMEM_ISA {
namespace {

// --- Statistics

template <class T>
void stats_planar(const NormArgs& a, NormRange r, double* mean, double* m2) {
  using A = compute_t<T>;
  alignas(64) A buffer[kChunk];
  const T* x = static_cast<const T*>(a.x);
  const int64_t channels = r.c1 - r.c0;
  Scratch<double> count(channels);
  for (int64_t c = 0; c < channels; ++c) mean[c] = m2[c] = 0;
  planar_chunks(a, r, [&](const Chunk& k) {
    const A* chunk = load(x + k.offset, buffer, k.n);
    for (int64_t j = 0; j < k.rows; ++j) {
      const int64_t c = k.index + j;
      const A* row = chunk + j * k.length;
      // The shift is close to the mean (the mean so far, at first this row's), so that nothing cancels in M2.
      A shift = static_cast<A>(mean[c]);
      double s, q;
      if (count[c] == 0) {
        moments(row, k.length, row[0], &s, &q);
        shift = static_cast<A>(row[0] + s / static_cast<double>(k.length));
      }
      moments(row, k.length, shift, &s, &q);
      const double n = static_cast<double>(k.length);
      merge(count[c], &mean[c], &m2[c], n, shift + s / n, q - s * s / n);
      count[c] += n;
    }
  });
}

template <class T>
void stats_rows(const NormArgs& a, NormRange r, double* mean, double* m2) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x) + r.o0 * a.channels;
  const int64_t C = a.channels, rows = r.o1 - r.o0, wide = a.period / C, periods = rows / wide;
  Scratch<double> lane_mean(a.period), lane_m2(a.period);
  // Tiles of lanes whose sums stay in L1 over a block of rows.
  constexpr int64_t tile = 512;
  alignas(64) A buffer[tile], shift[tile], s[tile], q[tile];
  for (int64_t first = 0; first < periods; first += kRowsPerFlush) {
    const int64_t last = first + kRowsPerFlush < periods ? first + kRowsPerFlush : periods;
    const double m = static_cast<double>(last - first), n = static_cast<double>(first), per = 1 / m,
                 share = m / (n + m);
    for (int64_t t = 0; t < a.period; t += tile) {
      const int64_t w = a.period - t < tile ? a.period - t : tile;
      double *lm = lane_mean.data + t, *lq = lane_m2.data + t;
      for (int64_t i = 0; i < w; ++i) shift[i] = static_cast<A>(lm[i]), s[i] = q[i] = 0;
      if (first == 0) {
        const int64_t few = last < 8 ? last : 8;
        for (int64_t p = 0; p < few; ++p) {
          const A* row = load(x + p * a.period + t, buffer, w);
          for (int64_t i = 0; i < w; ++i) shift[i] += row[i] / static_cast<A>(few);
        }
      }
      if constexpr (fusable<T>) {
        for (int64_t p = first; p < last; p += kDeep) {
          const int64_t deep = last - p < kDeep ? last - p : kDeep;
          for (int64_t i = 0; i < w; i += kLanes) {
            const Vec from = load_vec(shift + i);
            Vec si = load_vec(s + i), qi = load_vec(q + i);
            for (int64_t k = 0; k < deep; ++k) {
              const Vec d = load_vec(x + (p + k) * a.period + t + i) - from;
              si += d;
              qi += d * d;
            }
            store_vec(si, s + i);
            store_vec(qi, q + i);
          }
        }
      } else {
        for (int64_t p = first; p < last; ++p) {
          const A* row = load(x + p * a.period + t, buffer, w);
#pragma GCC ivdep
          for (int64_t i = 0; i < w; ++i) {
            const A d = row[i] - shift[i];
            s[i] += d;
            q[i] += d * d;
          }
        }
      }
#pragma GCC ivdep
      for (int64_t i = 0; i < w; ++i) {
        const double sum = s[i], delta = shift[i] + sum * per - lm[i];
        lm[i] += delta * share;
        lq[i] += q[i] - sum * sum * per + delta * delta * n * share;
      }
    }
  }
  // The lanes of a channel, then the rows that fill no period.
  for (int64_t c = 0; c < C; ++c) mean[c] = m2[c] = 0;
  if (periods > 0)
    for (int64_t w = 0; w < wide; ++w)
      for (int64_t c = 0; c < C; ++c)
        merge(static_cast<double>(w * periods), mean + c, m2 + c, static_cast<double>(periods), lane_mean[w * C + c],
              lane_m2[w * C + c]);
  for (int64_t p = periods * wide; p < rows; ++p)
    for (int64_t t = 0; t < C; t += tile) {
      const int64_t w = C - t < tile ? C - t : tile;
      const A* row = load(x + p * C + t, buffer, w);
      for (int64_t i = 0; i < w; ++i) merge(static_cast<double>(p), mean + t + i, m2 + t + i, 1.0, row[i], 0.0);
    }
}

template <class T>
void stats(const NormArgs& a, NormRange r, double* mean, double* m2) {
  if constexpr (fusable<T>)
    if (a.planar() && a.inner <= kChunk / 2 && r.o1 > r.o0) return fused_stats_planar<T>(a, r, mean, m2);
  if (a.planar())
    stats_planar<T>(a, r, mean, m2);
  else
    stats_rows<T>(a, r, mean, m2);
}

template <class T>
void exact_stats(const NormArgs& a, int64_t channel, double* mean, double* m2) {
  using A = compute_t<T>;
  const T* x = static_cast<const T*>(a.x);
  auto each = [&](auto f) {
    for (int64_t o = 0; o < a.outer; ++o)
      for (int64_t i = 0; i < a.inner; ++i) {
        A buffer[1];
        f(static_cast<double>(*load(x + (o * a.channels + channel) * a.inner + i, buffer, 1)));
      }
  };
  double sum = 0, squares = 0;
  each([&](double v) { sum += v; });
  const double m = sum / static_cast<double>(a.outer * a.inner);
  each([&](double v) { squares += (v - m) * (v - m); });
  *mean = m;
  *m2 = squares;
}

// --- Forward

template <class T>
void apply(const NormArgs& a, NormRange r) {
  using A = compute_t<T>;
  int64_t begin = r.o0 * a.channels;
  if constexpr (fusable<T>) {
    const bool done = with_fused(a, [&](auto act) {
      if (a.planar())
        fused_apply_planar<T>(a, r, act);
      else
        begin = fused_apply_rows<T>(a, r, act);
      end_stream(a);
    });
    if (done && a.planar()) return;
  }
  Buffers<A> b;
  chunks(a, r, begin, [&](const Chunk& k) {
    const A* x = load(static_cast<const T*>(a.x) + k.offset, b.x, k.n);
    T* out = static_cast<T*>(a.out) + k.offset;
    A* y = a.out == a.other ? b.pre : target(out, b.pre);
    affine(a, r, k, x, y, !a.planar());
    if (a.other) {
      const A* other = load(static_cast<const T*>(a.other) + k.offset, b.g, k.n);
#pragma GCC ivdep
      for (int64_t i = 0; i < k.n; ++i) y[i] += other[i];
    }
    if (a.mask)
      for (int64_t j = 0; j < k.rows; ++j) {
        act_flags(y + j * k.length, b.flags, k.length, a.act);
        pack_bits(b.flags, a.mask + k.mask + j * k.mask_stride, k.length);
      }
    act_forward(y, k.n, a.act);
    if constexpr (std::is_same_v<T, A>) {
      if (y != out) std::copy(y, y + k.n, out);
    } else {
      store(y, out, k.n);
    }
  });
}

// --- Backward

template <class T>
void reduce(const NormArgs& a, NormRange r, double* sum, double* dot) {
  using A = compute_t<T>;
  Buffers<A> b;
  const int64_t channels = r.c1 - r.c0;
  for (int64_t c = 0; c < channels; ++c) sum[c] = dot[c] = 0;
  int64_t begin = r.o0 * a.channels;
  if constexpr (fusable<T>) {
    Scratch<double> sums(a.period), dots(a.period);
    const bool done = with_fused(a, [&](auto act) {
      const bool plain = !a.from_mask && !a.grad_other;
      if (a.planar())
        plain ? fused_reduce_planar<T, true>(a, r, act, sum, dot) : fused_reduce_planar<T, false>(a, r, act, sum, dot);
      else
        begin = plain ? fused_reduce_rows<T, true>(a, r, act, sums.data, dots.data)
                      : fused_reduce_rows<T, false>(a, r, act, sums.data, dots.data);
    });
    if (done && a.planar()) return;
    for (int64_t i = 0; i < a.period; i += a.channels)
      for (int64_t c = 0; c < channels; ++c) sum[c] += sums[i + c], dot[c] += dots[i + c];
  }
  auto chunk_grad = [&](const Chunk& k, const A** x) {
    *x = a.x ? load(static_cast<const T*>(a.x) + k.offset, b.x, k.n) : nullptr;
    const A* g = grad_pre<T>(a, r, k, *x, b);
    if (a.grad_other) {
      T* out = static_cast<T*>(a.grad_other) + k.offset;
      if constexpr (sizeof(T) != sizeof(A))
        store(g, out, k.n);
      else if (g != out)
        std::memcpy(out, g, k.n * sizeof(T));
    }
    return g;
  };
  if (a.planar()) {
    const A* mean = static_cast<const A*>(a.mean);
    planar_chunks(a, r, [&](const Chunk& k) {
      const A* x;
      const A* g = chunk_grad(k, &x);
      for (int64_t j = 0; j < k.rows; ++j) {
        const int64_t c = k.index + j;
        if (x)
          dots(g + j * k.length, x + j * k.length, k.length, mean[r.c0 + c], &sum[c], &dot[c]);
        else
          sum[c] += product<A>(g + j * k.length, nullptr, k.length);
      }
    });
    return;
  }
  Scratch<A> s(a.period), q(a.period);
  int64_t periods = 0;
  auto flush = [&] {
    for (int64_t w = 0; w < a.period; w += a.channels)
      for (int64_t c = 0; c < a.channels; ++c) sum[c] += s[w + c], dot[c] += q[w + c];
    for (int64_t i = 0; i < a.period; ++i) s[i] = q[i] = 0;
    periods = 0;
  };
  row_chunks(a, r, begin, [&](const Chunk& k) {
    if (k.index == 0 && ++periods > kRowsPerFlush) flush();
    const A* x;
    const A* g = chunk_grad(k, &x);
    A *sk = s.data + k.index, *qk = q.data + k.index;
    if (x) {
      const A* mean = static_cast<const A*>(a.mean) + k.index;
#pragma GCC ivdep
      for (int64_t i = 0; i < k.n; ++i) {
        sk[i] += g[i];
        qk[i] += g[i] * (x[i] - mean[i]);
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < k.n; ++i) sk[i] += g[i];
    }
  });
  flush();
}

template <class T>
void grad(const NormArgs& a, NormRange r) {
  using A = compute_t<T>;
  int64_t begin = r.o0 * a.channels;
  if constexpr (fusable<T>) {
    const bool done = with_fused(a, [&](auto act) {
      if (a.planar() && a.tilt)
        fused_grad_planar<T, true>(a, r, act);
      else if (a.planar())
        fused_grad_planar<T, false>(a, r, act);
      else if (a.from_mask)
        begin = a.tilt ? fused_grad_rows<T, true, true>(a, r, act) : fused_grad_rows<T, false, true>(a, r, act);
      else
        begin = a.tilt ? fused_grad_rows<T, true, false>(a, r, act) : fused_grad_rows<T, false, false>(a, r, act);
      end_stream(a);
    });
    if (done && a.planar()) return;
  }
  Buffers<A> b;
  chunks(a, r, begin, [&](const Chunk& k) {
    const A* x = a.x ? load(static_cast<const T*>(a.x) + k.offset, b.x, k.n) : nullptr;
    const A* g = grad_pre<T>(a, r, k, x, b);
    T* out = static_cast<T*>(a.out) + k.offset;
    A* to = target(out, b.pre);
    input_grad(a, r, k, x, g, to, !a.planar());
    store(to, out, k.n);
  });
}

template <class T>
void dot(const NormArgs& a, NormRange r, double* out) {
  using A = compute_t<T>;
  Buffers<A> b;
  auto activated = [&](const Chunk& k) {
    const A* x = load(static_cast<const T*>(a.x) + k.offset, b.x, k.n);
    if (a.mean)
      affine(a, r, k, x, b.pre, !a.planar());
    else
      std::memcpy(b.pre, x, k.n * sizeof(A));
    act_forward(b.pre, k.n, a.act);
    return load(static_cast<const T*>(a.grad) + k.offset, b.g, k.n);
  };
  if (a.planar()) {
    for (int64_t i = 0; i < (r.o1 - r.o0) * (r.c1 - r.c0); ++i) out[i] = 0;
    planar_chunks(a, r, [&](const Chunk& k) {
      const A* g = activated(k);
      for (int64_t j = 0; j < k.rows; ++j)
        out[k.row * (r.c1 - r.c0) + k.index + j] += product<A>(g + j * k.length, b.pre + j * k.length, k.length);
    });
    return;
  }
  for (int64_t c = 0; c < a.channels; ++c) out[c] = 0;
  Scratch<A> q(a.period);
  int64_t periods = 0;
  auto flush = [&] {
    for (int64_t w = 0; w < a.period; w += a.channels)
      for (int64_t c = 0; c < a.channels; ++c) out[c] += q[w + c];
    for (int64_t i = 0; i < a.period; ++i) q[i] = 0;
    periods = 0;
  };
  row_chunks(a, r, r.o0 * a.channels, [&](const Chunk& k) {
    if (k.index == 0 && ++periods > kRowsPerFlush) flush();
    const A* g = activated(k);
    A* qk = q.data + k.index;
#pragma GCC ivdep
    for (int64_t i = 0; i < k.n; ++i) qk[i] += g[i] * b.pre[i];
  });
  flush();
}

}  // namespace

static void stats_any(const NormArgs& a, NormRange r, double* mean, double* m2) {
  with_dtype(a.dtype, [&](auto* of) { stats<std::remove_pointer_t<decltype(of)>>(a, r, mean, m2); });
}
static void exact_any(const NormArgs& a, int64_t c, double* mean, double* m2) {
  with_dtype(a.dtype, [&](auto* of) { exact_stats<std::remove_pointer_t<decltype(of)>>(a, c, mean, m2); });
}
static void apply_any(const NormArgs& a, NormRange r) {
  with_dtype(a.dtype, [&](auto* of) { apply<std::remove_pointer_t<decltype(of)>>(a, r); });
}
static void reduce_any(const NormArgs& a, NormRange r, double* sum, double* dot) {
  with_dtype(a.dtype, [&](auto* of) { reduce<std::remove_pointer_t<decltype(of)>>(a, r, sum, dot); });
}
static void grad_any(const NormArgs& a, NormRange r) {
  with_dtype(a.dtype, [&](auto* of) { grad<std::remove_pointer_t<decltype(of)>>(a, r); });
}
static void dot_any(const NormArgs& a, NormRange r, double* out) {
  with_dtype(a.dtype, [&](auto* of) { dot<std::remove_pointer_t<decltype(of)>>(a, r, out); });
}

extern const NormKernels norm_kernels_table;
const NormKernels norm_kernels_table = {stats_any, exact_any, apply_any, reduce_any, grad_any, dot_any};

}  // namespace tsmem::TSMEM_ISA
