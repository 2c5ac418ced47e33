// tsmem::_fused_dropout, _fused_dropout_again and _draws_as_pytorch on a CUDA device.
#include "common.h"
#include "cuda/device.h"
#include "cuda/dropout.h"
#include "cuda/raw_ops.h"
#include "layout.h"
#ifdef TSMEM_EMULATE_CUDA
#include <ATen/CPUGeneratorImpl.h>
#else
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace tsmem::cuda {
namespace {

using at::Tensor;

int64_t alignment_of(const Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  return address == 0 ? 16 : static_cast<int64_t>(address & (~address + 1));
}

#ifdef TSMEM_EMULATE_CUDA
Spread spread_for(int64_t n, int64_t element_size, int64_t alignment) {
  return dropout_spread(n, element_size, alignment, 2, 512);
}

Draw next_draw(const Tensor& x, int64_t) {
  at::Generator generator = at::globalContext().defaultGenerator(x.device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  Draw draw;
  draw.seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  draw.counter = 8;
  return draw;
}
#else
Spread spread_for(int64_t n, int64_t element_size, int64_t alignment) {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  return dropout_spread(n, element_size, alignment, device.multiProcessorCount, device.maxThreadsPerMultiProcessor);
}

Draw next_draw(const Tensor& x, int64_t by) {
  at::Generator generator = at::globalContext().defaultGenerator(x.device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::PhiloxCudaState next = generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(static_cast<uint64_t>(by));
  Draw draw;
  if (next.captured_) {
    draw.seed_at = next.seed_.ptr;
    draw.counter_at = next.offset_.ptr;
    draw.counter = next.offset_intragraph_;
  } else {
    draw.seed = next.seed_.val;
    draw.counter = next.offset_.val;
  }
  return draw;
}
#endif

Spread spread_of(const Tensor& x) { return spread_for(x.numel(), x.element_size(), alignment_of(x)); }

// What `spread` gives x, in these strides, which x has but for dimensions of one element. PyTorch draws for groups in
// the order of memory, and for single elements in that of indices.
Tensor draw_for(const Tensor& x, double p, const Draw& draw, const Spread& spread, int64_t* state,
                at::IntArrayRef strides, Stream stream) {
  const bool by_index = spread.group == 1 && !x.is_contiguous();
  const Tensor from = by_index ? x.contiguous() : x;
  const Tensor out = at::empty_strided(x.sizes(), by_index ? from.strides() : strides, x.options());
  dropout(cpu_dtype(x.scalar_type()), read(from), write(out), x.numel(), 1 - p, draw, spread, state,
          aligned({from, out}), stream);
  return by_index ? at::empty_strided(x.sizes(), strides, x.options()).copy_(out) : out;
}

std::tuple<Tensor, Tensor, int64_t> fused_dropout(const Tensor& x, double p) {
  const OnDevice on(x);
  const Spread spread = spread_of(x);
  const Draw draw = next_draw(x, dropout_counter(x.numel(), spread));
  Tensor state = at::empty({2}, x.options().dtype(at::kLong));
  Tensor out = draw_for(x, p, draw, spread, state.mutable_data_ptr<int64_t>(), x.strides(), on.stream);
  return {out, state, spread.group};
}

Tensor fused_dropout_again(const Tensor& x, const Tensor& state, double p, int64_t group, at::IntArrayRef strides) {
  const OnDevice on(x);
  const Tensor dense = in_layout(x, strides);
  Spread spread = spread_of(dense);
  spread.group = static_cast<int>(group);
  Draw draw;
  draw.seed_at = state.const_data_ptr<int64_t>();
  draw.counter_at = draw.seed_at + 1;
  return draw_for(dense, p, draw, spread, nullptr, strides, on.stream);
}

#ifndef TSMEM_EMULATE_CUDA
// Tensors of which PyTorch's kernel and ours must make the same, as other versions may draw in another order: of one
// group and of several a thread, and for each size of a group.
bool draws_as_pytorch(const Tensor& on) {
  const at::cuda::CUDAGuard guard(on.device());
  const at::Generator own = at::globalContext().defaultGenerator(on.device()).clone();
  const int64_t most = spread_for(int64_t{1} << 40, 4, 16).blocks * kDropoutThreads;
  constexpr uint64_t seed = 0x123456789abcdef, counter = 20;
  constexpr double p = 0.3;
  const Tensor state =
      at::tensor({static_cast<int64_t>(seed), static_cast<int64_t>(counter)}, at::kLong).to(on.device());
  for (const auto& [dtype, n] : std::initializer_list<std::pair<at::ScalarType, int64_t>>{{at::kBFloat16, 8 * most + 8},
                                                                                          {at::kHalf, 4 * most + 4},
                                                                                          {at::kFloat, 4 * most + 4},
                                                                                          {at::kFloat, 1002},
                                                                                          {at::kDouble, 2 * most + 2},
                                                                                          {at::kFloat, 4 * most + 1},
                                                                                          {at::kBFloat16, 7}}) {
    const Tensor x = at::full({n}, 0.7, on.options().dtype(dtype));
    at::Generator generator = own;
    generator.set_current_seed(seed);
    generator.set_offset(counter);
    const Tensor theirs = std::get<0>(at::_fused_dropout(x, 1 - p, generator));
    const Spread spread = spread_of(x);
    if (!at::equal(theirs, fused_dropout_again(x, state, p, spread.group, x.strides())) ||
        generator.get_offset() != counter + static_cast<uint64_t>(dropout_counter(n, spread)))
      return false;
  }
  return true;
}
#endif

}  // namespace

void implement_dropout(torch::Library& m) {
  m.impl("_fused_dropout", TORCH_FN(fused_dropout));
  m.impl("_fused_dropout_again", TORCH_FN(fused_dropout_again));
#ifndef TSMEM_EMULATE_CUDA
  m.impl("_draws_as_pytorch", TORCH_FN(draws_as_pytorch));
#endif
}

}  // namespace tsmem::cuda
