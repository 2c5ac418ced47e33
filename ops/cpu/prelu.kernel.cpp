#include "cpu/prelu.h"

#include "cpu/norm_chunks.h"

namespace tsmem::TSMEM_ISA {
namespace {

// f(channel of the first, position, elements) for the pieces of [begin, end) that fit a chunk: of one channel each, or,
// where channels are innermost, of some of them in order.
template <class F>
inline void pieces(const PreluArgs& a, int64_t begin, int64_t end, F f) {
  const int64_t run = a.inner > 1 ? a.inner : a.channels;
  for (int64_t at = begin; at < end;) {
    int64_t n = run - at % run;
    if (n > kChunk) n = kChunk;
    if (at + n > end) n = end - at;
    f(a.inner > 1 ? at / run % a.channels : at % run, at, n);
    at += n;
  }
}

template <class A>
inline void scale(const A* x, A* y, const A* weight, int64_t n, bool rows) {
  if (rows) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] > A(0) ? x[i] : x[i] * weight[i];
  } else {
    const A w = weight[0];
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] > A(0) ? x[i] : x[i] * w;
  }
}

// to = grad * slope, where there is `to`, and terms = what each element adds to the slope's gradient.
template <class A>
inline void gradients(const A* x, const A* g, A* to, A* terms, const A* weight, int64_t n, bool rows) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) terms[i] = x[i] > A(0) ? A(0) : x[i] * g[i];
  if (!to) return;
  if (rows) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = x[i] > A(0) ? g[i] : weight[i] * g[i];
  } else {
    const A w = weight[0];
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = x[i] > A(0) ? g[i] : w * g[i];
  }
}

template <class T>
void forward(const PreluArgs& a, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  alignas(64) A x[kChunk], y[kChunk];
  const auto* weight = static_cast<const A*>(a.weight);
  pieces(a, begin, end, [&](int64_t channel, int64_t at, int64_t n) {
    A* to = target(static_cast<T*>(a.out) + at, y);
    scale(load(static_cast<const T*>(a.x) + at, x, n), to, weight + channel, n, a.inner == 1);
    store(to, static_cast<T*>(a.out) + at, n);
  });
}

template <class T>
void backward(const PreluArgs& a, int64_t begin, int64_t end, double* sums) {
  using A = compute_t<T>;
  alignas(64) A x[kChunk], g[kChunk], y[kChunk], terms[kChunk];
  const auto* weight = static_cast<const A*>(a.weight);
  const bool rows = a.inner == 1;
  pieces(a, begin, end, [&](int64_t channel, int64_t at, int64_t n) {
    auto* out = static_cast<T*>(a.out);
    A* to = out ? target(out + at, y) : nullptr;
    gradients(load(static_cast<const T*>(a.x) + at, x, n), load(static_cast<const T*>(a.grad) + at, g, n), to, terms,
              weight + channel, n, rows);
    if (to) store(to, out + at, n);
    if (!sums) return;
    if (!rows) {
      sums[channel] += product<A>(terms, nullptr, n);
    } else {
      for (int64_t i = 0; i < n; ++i) sums[channel + i] += static_cast<double>(terms[i]);
    }
  });
}

void forward_any(const PreluArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto* of) { forward<std::remove_pointer_t<decltype(of)>>(a, begin, end); });
}

void backward_any(const PreluArgs& a, int64_t begin, int64_t end, double* sums) {
  with_dtype(a.dtype, [&](auto* of) { backward<std::remove_pointer_t<decltype(of)>>(a, begin, end, sums); });
}

}  // namespace

extern const PreluKernels prelu_kernels_table;
const PreluKernels prelu_kernels_table = {forward_any, backward_any};

}  // namespace tsmem::TSMEM_ISA
