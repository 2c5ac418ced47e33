#include "cpu/rnn.h"

#include "cpu/act_math.h"
#include "cpu/chunk.h"

namespace tsmem::TSMEM_ISA {
namespace {

constexpr int64_t kBlock = 256;  // columns at once: of all gates they stay in the first-level cache

template <class T>
const T* row(Rows2d m, int64_t i) {
  return static_cast<const T*>(m.data) + i * m.stride;
}
template <class T>
T* row(MutableRows2d m, int64_t i) {
  return m.data ? static_cast<T*>(m.data) + i * m.stride : nullptr;
}

// f(row, first column, number of columns) for blocks of columns.
template <class F>
void each_block(int64_t rows, int64_t n, const F& f) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t at = 0; at < n; at += kBlock) f(i, at, n - at < kBlock ? n - at : kBlock);
}

template <class T>
void lstm_forward(T* gates, compute_t<T>* c, compute_t<T>* before, MutableRows2d h, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[4][kBlock], out[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    T* g[4];
    A* y[4];
    for (int k = 0; k < 4; ++k) {
      g[k] = gates + (4 * i + k) * n + at;
      load(g[k], buffer[k], count);
      y[k] = target(g[k], buffer[k]);
    }
    A *gi = y[0], *gf = y[1], *gc = y[2], *go = y[3], *cell = c + i * n + at;
    if (before) std::memcpy(before + i * n + at, cell, count * sizeof(A));
    T* to = row<T>(h, i);
    A* result = to ? target(to + at, out) : out;
    if (before) {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        gi[j] = sigmoid_of(gi[j]);
        gf[j] = sigmoid_of(gf[j]);
        gc[j] = tanh_of(gc[j]);
        go[j] = sigmoid_of(go[j]);
        cell[j] = gf[j] * cell[j] + gi[j] * gc[j];
      }
      for (int k = 0; k < 4; ++k) store(y[k], g[k], count);
      if (!to) return;
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = go[j] * tanh_of(cell[j]);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) cell[j] = sigmoid_of(gf[j]) * cell[j] + sigmoid_of(gi[j]) * tanh_of(gc[j]);
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = sigmoid_of(go[j]) * tanh_of(cell[j]);
    }
    store(result, to + at, count);
  });
}

template <class T>
void lstm_cell(const T* gates, compute_t<T>* c, compute_t<T>* before, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[3][kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    const A* g[3];
    for (int k = 0; k < 3; ++k) g[k] = load(gates + (4 * i + k) * n + at, buffer[k], count);
    const A *in = g[0], *forget = g[1], *made = g[2];
    A *cell = c + i * n + at, *was = before + i * n + at;
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      was[j] = cell[j];
      cell[j] = forget[j] * cell[j] + in[j] * made[j];
    }
  });
}

template <class T>
void lstm_backward(T* gates, const compute_t<T>* c_before, Rows2d dh1, Rows2d dh2, compute_t<T>* dc, int64_t rows,
                   int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[4][kBlock], first[kBlock], second[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    T* g[4];
    A* y[4];
    for (int k = 0; k < 4; ++k) {
      g[k] = gates + (4 * i + k) * n + at;
      load(g[k], buffer[k], count);
      y[k] = target(g[k], buffer[k]);
    }
    A *gi = y[0], *gf = y[1], *gc = y[2], *go = y[3], *d = dc + i * n + at;
    const A *a = load(row<T>(dh1, i) + at, first, count), *b = load(row<T>(dh2, i) + at, second, count),
            *before = c_before + i * n + at;
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const A in = gi[j], forget = gf[j], cell = gc[j], out = go[j], dh = a[j] + b[j];
      const A t = tanh_of(forget * before[j] + in * cell);
      const A dcell = d[j] + dh * out * (1 - t * t);
      gi[j] = dcell * cell * in * (1 - in);
      gf[j] = dcell * before[j] * forget * (1 - forget);
      gc[j] = dcell * in * (1 - cell * cell);
      go[j] = dh * t * out * (1 - out);
      d[j] = dcell * forget;
    }
    for (int k = 0; k < 4; ++k) store(y[k], g[k], count);
  });
}

template <class T>
void gru_forward(T* gi, const T* gh, Rows2d before, MutableRows2d h, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[3][kBlock], hidden[3][kBlock], state[kBlock], out[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    T* g[3];
    A* y[3];
    const A* x[3];
    for (int k = 0; k < 3; ++k) {
      g[k] = gi + (3 * i + k) * n + at;
      load(g[k], buffer[k], count);
      y[k] = target(g[k], buffer[k]);
      x[k] = load(gh + (3 * i + k) * n + at, hidden[k], count);
    }
    A *r = y[0], *z = y[1], *c = y[2];
    const A *hr = x[0], *hz = x[1], *hc = x[2];
    if (T* to = row<T>(h, i)) {
      const A* last = load(row<T>(before, i) + at, state, count);
      A* result = target(to + at, out);
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const A made = tanh_of(c[j] + hc[j] * sigmoid_of(r[j] + hr[j]));
        result[j] = (last[j] - made) * sigmoid_of(z[j] + hz[j]) + made;
      }
      store(result, to + at, count);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        r[j] = sigmoid_of(r[j] + hr[j]);
        z[j] = sigmoid_of(z[j] + hz[j]);
        c[j] = tanh_of(c[j] + hc[j] * r[j]);
      }
      for (int k = 0; k < 3; ++k) store(y[k], g[k], count);
    }
  });
}

template <class T>
void gru_backward(T* gi, T* gh, Rows2d before, Rows2d dh1, T* dh, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[3][kBlock], hidden[3][kBlock], state[kBlock], first[kBlock], second[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    T *g[3], *gx[3];
    A *y[3], *x[3];
    for (int k = 0; k < 3; ++k) {
      g[k] = gi + (3 * i + k) * n + at;
      gx[k] = gh + (3 * i + k) * n + at;
      load(g[k], buffer[k], count);
      load(gx[k], hidden[k], count);
      y[k] = target(g[k], buffer[k]);
      x[k] = target(gx[k], hidden[k]);
    }
    A *r = y[0], *z = y[1], *c = y[2], *hr = x[0], *hz = x[1], *hc = x[2];
    T* through = dh + i * n + at;
    load(through, second, count);
    A* d = target(through, second);
    const A *last = load(row<T>(before, i) + at, state, count), *a = load(row<T>(dh1, i) + at, first, count);
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const A sum = a[j] + d[j], reset = r[j], update = z[j], made = c[j];
      const A dmade = sum * (1 - update) * (1 - made * made);
      const A dreset = dmade * hc[j] * reset * (1 - reset);
      const A dupdate = sum * (last[j] - made) * update * (1 - update);
      r[j] = hr[j] = dreset;
      z[j] = hz[j] = dupdate;
      c[j] = dmade;
      hc[j] = dmade * reset;
      d[j] = sum * update;
    }
    for (int k = 0; k < 3; ++k) {
      store(y[k], g[k], count);
      store(x[k], gx[k], count);
    }
    store(d, through, count);
  });
}

template <class T>
void rnn_forward(bool relu, const T* g, MutableRows2d h, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[kBlock], out[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    T* to = row<T>(h, i) + at;
    A* result = target(to, out);
    const A* x = load(g + i * n + at, buffer, count);
    if (relu) {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = x[j] <= A(0) ? A(0) : x[j];
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = tanh_of(x[j]);
    }
    store(result, to, count);
  });
}

template <class T>
void rnn_backward(bool relu, Rows2d h, Rows2d dh1, Rows2d dh2, T* g, int64_t rows, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A state[kBlock], first[kBlock], second[kBlock], out[kBlock];
  each_block(rows, n, [&](int64_t i, int64_t at, int64_t count) {
    const A *y = load(row<T>(h, i) + at, state, count), *a = load(row<T>(dh1, i) + at, first, count),
            *b = load(row<T>(dh2, i) + at, second, count);
    A* result = target(g + i * n + at, out);
    if (relu) {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = y[j] <= A(0) ? A(0) : a[j] + b[j];
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) result[j] = (a[j] + b[j]) * (1 - y[j] * y[j]);
    }
    store(result, g + i * n + at, count);
  });
}

// f with the arguments' elements as T and the type that it is computed in.
template <class F>
void typed(Dtype dtype, const F& f) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    f(of, static_cast<compute_t<T>*>(nullptr));
  });
}
template <class T>
T* as(T*, void* p) {
  return static_cast<T*>(p);
}
template <class T>
const T* as(T*, const void* p) {
  return static_cast<const T*>(p);
}

void lstm_forward_any(Dtype dtype, void* gates, void* c, void* before, MutableRows2d h, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto* a) { lstm_forward(as(t, gates), as(a, c), as(a, before), h, rows, n); });
}
void lstm_cell_any(Dtype dtype, const void* gates, void* c, void* before, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto* a) { lstm_cell(as(t, gates), as(a, c), as(a, before), rows, n); });
}
void lstm_backward_any(Dtype dtype, void* gates, const void* c_before, Rows2d dh1, Rows2d dh2, void* dc, int64_t rows,
                       int64_t n) {
  typed(dtype, [&](auto* t, auto* a) { lstm_backward(as(t, gates), as(a, c_before), dh1, dh2, as(a, dc), rows, n); });
}
void gru_forward_any(Dtype dtype, void* gi, const void* gh, Rows2d before, MutableRows2d h, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto*) { gru_forward(as(t, gi), as(t, gh), before, h, rows, n); });
}
void gru_backward_any(Dtype dtype, void* gi, void* gh, Rows2d before, Rows2d dh1, void* dh, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto*) { gru_backward(as(t, gi), as(t, gh), before, dh1, as(t, dh), rows, n); });
}
void rnn_forward_any(Dtype dtype, bool relu, const void* g, MutableRows2d h, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto*) { rnn_forward(relu, as(t, g), h, rows, n); });
}
void rnn_backward_any(Dtype dtype, bool relu, Rows2d h, Rows2d dh1, Rows2d dh2, void* g, int64_t rows, int64_t n) {
  typed(dtype, [&](auto* t, auto*) { rnn_backward(relu, h, dh1, dh2, as(t, g), rows, n); });
}

}  // namespace

extern const RnnKernels rnn_kernels_table;
const RnnKernels rnn_kernels_table = {lstm_forward_any, lstm_cell_any,   lstm_backward_any, gru_forward_any,
                                      gru_backward_any, rnn_forward_any, rnn_backward_any};

}  // namespace tsmem::TSMEM_ISA
