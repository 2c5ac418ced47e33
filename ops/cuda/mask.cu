#include "cuda/mask.h"

#include <type_traits>

#include "cuda/act_math.h"
#include "cuda/element.h"

namespace tsmem::cuda {

namespace {

constexpr unsigned kThreads = 256;

// An octet a thread, which makes or reads one byte of the mask.
template <class T>
__global__ void pack(Act act, const T* x, T* y, uint8_t* mask, int64_t n, bool aligned) {
  using A = compute_t<T>;
  const int64_t octet = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, e = 8 * octet;
  if (e >= n) return;
  const int hi = static_cast<int>(min(n - e, int64_t{8}));
  A v[8];
  numbers_in(read_octet<false>(x + e, aligned && hi == 8, 0, hi), v);
  mask[octet] = static_cast<uint8_t>(act_bits(v, act));
  act_octet(v, act);
  store_octet(v, y + e, aligned, 0, hi);
}

template <class T>
__global__ void apply(Act act, const T* grad, const uint8_t* mask, T* out, int64_t n, bool aligned) {
  using A = compute_t<T>;
  const int64_t octet = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, e = 8 * octet;
  if (e >= n) return;
  const int hi = static_cast<int>(min(n - e, int64_t{8}));
  A g[8];
  numbers_in(read_octet<false>(grad + e, aligned && hi == 8, 0, hi), g);
  bits_backward(mask[octet], g, act);
  store_octet(g, out + e, aligned, 0, hi);
}

int64_t blocks_of(int64_t n) { return (n + 8 * kThreads - 1) / (8 * kThreads); }

}  // namespace

void mask_pack(Dtype dtype, const Act& act, const void* x, void* y, uint8_t* mask, int64_t n, bool aligned,
               Stream stream) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    launch("mask_pack", pack<T>, blocks_of(n), Block{kThreads}, stream, act, static_cast<const T*>(x),
           static_cast<T*>(y), mask, n, aligned);
  });
}

void mask_apply(Dtype dtype, const Act& act, const void* grad, const uint8_t* mask, void* out, int64_t n, bool aligned,
                Stream stream) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    launch("mask_apply", apply<T>, blocks_of(n), Block{kThreads}, stream, act, static_cast<const T*>(grad), mask,
           static_cast<T*>(out), n, aligned);
  });
}

}  // namespace tsmem::cuda
