// tsmem::_graph_offset: what a CUDA graph under capture has drawn so far. tsmem::_move_counter: draws that a copy of
// the generator has made.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "cuda/raw_ops.h"

namespace tsmem::cuda {
namespace {

int64_t graph_offset(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) return -1;
  at::Generator generator = at::globalContext().defaultGenerator(x.device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  try {
    // Draws nothing: moves the counter by 0.
    return static_cast<int64_t>(generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(0).offset_intragraph_);
  } catch (const c10::Error&) {
    return 0;  // a generator that the graph does not know: nothing can draw from it
  }
}

void move_counter(const at::Tensor& x, int64_t by) {
  const at::Generator generator = at::globalContext().defaultGenerator(x.device());
  generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(static_cast<uint64_t>(by));
}

}  // namespace

void implement_graph(torch::Library& m) {
  m.impl("_graph_offset", TORCH_FN(graph_offset));
  m.impl("_move_counter", TORCH_FN(move_counter));
}

}  // namespace tsmem::cuda
