// Calls of every kernel of ops/cuda on small maps, for tests that look at how the kernels work and not at what they
// give (tests/ops/test_cuda_emulated.py does that).
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/dropout.h"
#include "cuda/launch.h"
#include "cuda/mask.h"
#include "cuda/norm.h"
#include "cuda/pool.h"

namespace tsmem::cuda::cases {

// Maps and vectors of a call, at multiples of 64 bytes or `offset` elements behind; numbers around 0.
class Memory {
 public:
  explicit Memory(Dtype dtype, int64_t offset = 0) : dtype_(dtype), offset_(offset) {}

  // `n` elements of the dtype.
  void* map(int64_t n) {
    const int64_t size = dtype_ == Dtype::f64 ? 8 : dtype_ == Dtype::f32 ? 4 : 2;
    char* to = bytes((n + offset_) * size) + offset_ * size;
    for (int64_t i = 0; i < n; ++i) {
      const float value = number(i);
      const double wide = value;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint16_t half = dtype_ == Dtype::bf16 ? bits >> 16 : (i % 2 << 15) | (14 + i % 3) << 10 | i % 1024;
      const void* from = size == 8   ? static_cast<const void*>(&wide)
                         : size == 4 ? static_cast<const void*>(&value)
                                     : &half;
      std::memcpy(to + i * size, from, size);
    }
    return to;
  }
  // `n` numbers as the kernels have them for a channel.
  void* vector(int64_t n) {
    char* to = bytes(8 * n);
    for (int64_t i = 0; i < n; ++i) {
      const float value = 1 + number(i) / 4;
      const double wide = value;
      dtype_ == Dtype::f64 ? std::memcpy(to + 8 * i, &wide, 8) : std::memcpy(to + 4 * i, &value, 4);
    }
    return to;
  }
  Numbers numbers(int64_t n) { return {vector(n), dtype_ == Dtype::f64 ? Dtype::f64 : Dtype::f32, 1}; }
  double* doubles(int64_t n) { return reinterpret_cast<double*>(bytes(8 * n)); }
  char* bytes(int64_t n) {
    const auto size = static_cast<size_t>((n + 127) / 64 * 64);
#ifdef TSMEM_EMULATE_CUDA
    void* memory = std::aligned_alloc(64, size);
#else
    void* memory = nullptr;
    if (const cudaError_t error = cudaMallocManaged(&memory, size); error != cudaSuccess)
      fail("(memory)", cudaGetErrorString(error));
#endif
    blocks_.emplace_back(static_cast<char*>(memory));
    return blocks_.back().get();
  }

 private:
  static float number(int64_t i) { return static_cast<float>((i * 2654435761u >> 8) % 1000) / 500.f - 1; }
  struct Free {
#ifdef TSMEM_EMULATE_CUDA
    void operator()(char* p) const { std::free(p); }
#else
    void operator()(char* p) const { cudaFree(p); }  // which waits for the kernels
#endif
  };
  Dtype dtype_;
  int64_t offset_;
  std::vector<std::unique_ptr<char, Free>> blocks_;
};

// A map of [outer, channels, inner]; inner 1: rows.
struct Shape {
  int64_t outer, channels, inner;
};

inline NormArgs view(const Shape& shape, Dtype dtype, ActKind kind, bool aligned) {
  NormArgs a;
  a.dtype = dtype;
  a.aligned = aligned;
  a.outer = shape.outer, a.channels = shape.channels, a.inner = shape.inner;
  a.numel = a.outer * a.channels * a.inner;
  a.by_inner = Divider(a.inner, a.numel);
  a.by_channels = Divider(a.channels, a.numel);
  a.act.kind = kind;
  a.act.a = 0.1, a.act.b = 1, a.act.c = 20;
  return a;
}

inline NormArgs without_other(NormArgs a) {
  a.grad_other = nullptr;
  return a;
}

// Forward and backward of batch norm + activation (+ add), in training, then once more with the gradient overwritten;
// the same by the kernels that keep a map on chip, where it fits; the gradient of a scale.
inline void norm(const Shape& shape, Dtype dtype, ActKind kind, bool add, bool masked, int64_t offset = 0) {
  Memory memory(dtype, offset);
  NormArgs a = view(shape, dtype, kind, offset == 0);
  const int64_t c = a.channels;
  const auto map = [&] { return memory.map(a.numel); };
  a.x = map();
  if (add) a.other = map();
  a.out = map();
  if (masked) a.mask = reinterpret_cast<uint8_t*>(memory.bytes(a.outer * c * ((a.inner + 7) / 8) + a.numel / 8 + 8));
  const Split s = split(a, 1);
  double* partial = memory.doubles(3 * c * s.parts());
  norm_stats(a, s, partial, nullptr);
  StatsArgs statistics;
  statistics.partial = partial;
  statistics.parts = s.parts();
  statistics.channels = c;
  statistics.running_mean = memory.numbers(c), statistics.running_var = memory.numbers(c);
  statistics.momentum = 0.1, statistics.eps = 1e-5;
  statistics.f64 = dtype == Dtype::f64;
  void *mean = memory.vector(c), *invstd = memory.vector(c);
  statistics.mean = mean, statistics.invstd = invstd;
  norm_finish_stats(statistics, nullptr);
  a.mean = mean, a.invstd = invstd;
  a.weight = memory.numbers(c), a.bias = memory.numbers(c);
  norm_apply(a, nullptr);
  if (norm_forward_fits(a)) norm_forward(a, s, statistics, partial, nullptr);

  NormArgs b = a;
  void* grad = map();
  b.grad = grad;
  b.out = map();
  if (add) b.grad_other = map();
  b.from_mask = masked;
  norm_reduce(b, s, partial, nullptr);
  SumsArgs sums;
  sums.partial = partial;
  sums.parts = s.parts();
  sums.channels = c;
  sums.count = static_cast<double>(a.outer * a.inner);
  sums.f64 = dtype == Dtype::f64;
  sums.invstd = invstd;
  sums.weight = a.weight;
  sums.grad_weight = memory.vector(c), sums.grad_bias = memory.vector(c);
  sums.tilt = memory.vector(c), sums.level = memory.vector(c);
  norm_finish_sums(sums, nullptr);
  b.tilt = sums.tilt, b.level = sums.level;
  norm_grad(b, nullptr);
  const bool fits = norm_backward_fits(b);
  if (fits) norm_backward(b, without_other(b), s, sums, partial, false, nullptr);
  b.grad_other = grad;
  norm_reduce(b, s, partial, nullptr);
  b.grad_other = nullptr, b.out = grad;
  norm_grad(b, nullptr);
  if (fits) {  // the gradient's memory for the residual's gradient, then for the input's
    NormArgs first = b;
    first.grad_other = grad, first.out = map();
    NormArgs second = without_other(first);
    second.act = {}, second.from_mask = false, second.other = nullptr;
    norm_backward(first, second, s, sums, partial, true, nullptr);
    norm_backward(b, b, s, sums, partial, false, nullptr);
  }

  NormArgs scale = view(shape, dtype, kind, offset == 0);
  scale.x = a.x, scale.grad = grad;
  const int64_t segments = a.planar() ? a.outer : 1;
  const Split parts = split(scale, segments);
  norm_scale_grad(scale, parts, memory.doubles(2 * segments * c * parts.parts()), memory.vector(segments * c), nullptr);
}

struct Window {
  int64_t size, stride, padding, dilation;
};

// Max pooling, and that of a batch norm with its activation: forward, again, sums and backward.
inline void pools(int64_t batch, int64_t channels, int64_t height, int64_t width, const Window& window, Dtype dtype,
                  bool last, ActKind kind) {
  Memory memory(dtype);
  PoolArgs p;
  p.norm = view({last ? batch * height * width : batch, channels, last ? 1 : height * width}, dtype, kind, true);
  p.channels_last = last;
  p.batch = batch;
  PoolAxis* const axes[2] = {&p.h, &p.w};
  for (PoolAxis* axis : axes) {
    axis->in = axis == &p.h ? height : width;
    axis->window = window.size, axis->stride = window.stride, axis->padding = window.padding,
    axis->dilation = window.dilation;
    axis->out = (axis->in + 2 * window.padding - window.dilation * (window.size - 1) - 1) / window.stride + 1;
  }
  p.position_bytes = window.size * window.size <= 256 ? 1 : 2;
  p.x = memory.map(p.inputs());
  p.norm.x = p.x;
  void *mean = memory.vector(channels), *invstd = memory.vector(channels);
  p.norm.mean = mean, p.norm.invstd = invstd;
  p.out = memory.map(p.outputs());
  p.positions = memory.bytes(p.position_bytes * p.outputs());
  prepare(p, true);
  norm_pool_forward(p, nullptr);
  norm_pool_again(p, nullptr);
  pool_forward(p, nullptr);

  p.grad = memory.map(p.outputs());
  PoolArgs first = p;
  first.norm.numel = p.outputs();
  first.norm.outer = last ? batch * p.h.out * p.w.out : batch;
  first.norm.inner = last ? 1 : p.h.out * p.w.out;
  prepare(first, true);
  const Split s = split(first.norm, 1);
  norm_pool_reduce(first, s, memory.doubles(2 * channels * s.parts()), nullptr);
  p.norm.tilt = memory.vector(channels), p.norm.level = memory.vector(channels);
  p.out = memory.map(p.inputs());
  prepare(p, false);
  pool_backward(p, nullptr);
  norm_pool_backward(p, nullptr);
}

inline void masks(int64_t n, Dtype dtype, ActKind kind, int64_t offset = 0) {
  Memory memory(dtype, offset);
  Act act;
  act.kind = kind;
  act.a = 0.1, act.b = 1;
  const void* x = memory.map(n);
  void* y = memory.map(n);
  auto* mask = reinterpret_cast<uint8_t*>(memory.bytes(n / 8 + 1));
  mask_pack(dtype, act, x, y, mask, n, offset == 0, nullptr);
  mask_apply(dtype, act, x, mask, y, n, offset == 0, nullptr);
}

// Dropout, and its noise times another map; as many multiprocessors as `multiprocessors`.
inline void dropouts(int64_t n, Dtype dtype, int64_t offset = 0, int64_t multiprocessors = 2) {
  Memory memory(dtype, offset);
  const int64_t size = dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
  const Spread spread = dropout_spread(n, size, offset == 0 ? 16 : size, multiprocessors, 512);
  const void* x = memory.map(n);
  void* out = memory.map(n);
  auto* state = reinterpret_cast<int64_t*>(memory.bytes(16));
  Draw draw;
  draw.seed = 7, draw.counter = 4;
  dropout(dtype, x, out, n, 0.7, draw, spread, state, offset == 0, nullptr);
  Draw again;
  again.seed_at = state, again.counter_at = state + 1;
  dropout(dtype, out, out, n, 0.7, again, spread, nullptr, offset == 0, nullptr);
}

}  // namespace tsmem::cuda::cases
