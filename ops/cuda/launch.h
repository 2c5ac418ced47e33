// Launches a kernel. For .cu files.
#pragma once
#include "cuda/args.h"

namespace tsmem::cuda {

// Raises an error (mask_ops.cpp): `what` is a kernel's name, `why` the runtime's sentence.
[[noreturn]] void fail(const char* what, const char* why);

// Runs kernel(args...) on `blocks` blocks, in order with the stream's other work. No blocks: nothing to do.
#ifdef TSMEM_EMULATE_CUDA
template <class... P, class... A>
void launch(const char*, void (*kernel)(P...), int64_t blocks, Block block, Stream, const A&... args) {
  emulate::run(blocks, block.x, block.y, [&] { kernel(args...); });
}
#else
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), int64_t blocks, Block block, Stream stream, const A&... args) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) fail(name, "too many blocks");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(block.x, block.y);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) fail(name, cudaGetErrorString(error));
}
#endif

}  // namespace tsmem::cuda
