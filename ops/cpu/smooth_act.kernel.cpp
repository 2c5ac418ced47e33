#include "cpu/smooth_act.h"

#include "cpu/act_math.h"
#include "cpu/chunk.h"

namespace tsmem::TSMEM_ISA {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are converted at once: stays in the first-level cache

template <class T>
void forward(const Act& act, const T* x, T* out, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t count = n - at < kBlock ? n - at : kBlock;
    A* y = target(out + at, buffer);
    const A* from = load(x + at, buffer, count);
    if (from != y) std::memcpy(y, from, count * sizeof(A));
    act_forward(y, count, act);
    store(y, out + at, count);
  }
}

template <class T>
void backward(const Act& act, const T* x, const T* grad, T* out, int64_t n) {
  using A = compute_t<T>;
  alignas(64) A buffer[kBlock], grads[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t count = n - at < kBlock ? n - at : kBlock;
    A* to = target(out + at, buffer);
    act_backward(load(x + at, buffer, count), load(grad + at, grads, count), to, count, act);
    store(to, out + at, count);
  }
}

void forward_any(Dtype dtype, const Act& act, const void* x, void* out, int64_t n) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    forward(act, static_cast<const T*>(x), static_cast<T*>(out), n);
  });
}

void backward_any(Dtype dtype, const Act& act, const void* x, const void* grad, void* out, int64_t n) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    backward(act, static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<T*>(out), n);
  });
}

}  // namespace

extern const SmoothActKernels smooth_act_kernels_table;
const SmoothActKernels smooth_act_kernels_table = {forward_any, backward_any};

}  // namespace tsmem::TSMEM_ISA
