// Kernels whose blocks are all on the device at once and wait for each other (cooperative launches): how many blocks
// fit, the launch, and the barrier. For .cu files.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/launch.h"
#ifndef TSMEM_EMULATE_CUDA
#include <cooperative_groups.h>
#endif

namespace tsmem::cuda {

// A launch of as many blocks, each with as many bytes of dynamic shared memory. No blocks: it does not fit.
struct Together {
  int64_t blocks = 0;
  size_t bytes = 0;
  bool fits() const { return blocks > 0; }
};

#ifdef TSMEM_EMULATE_CUDA
__device__ inline void sync_grid() { emulate::wait(emulate::Wait::grid); }
__device__ inline uint4* dynamic_shared() { return emulate::dynamic_shared(); }

// What the current device has for a kernel.
struct Chip {
  int64_t multiprocessors = emulate::state().multiprocessors;
  size_t bytes = emulate::kChip - emulate::kChipOfBlock;  // of dynamic shared memory, that a block may have
  explicit Chip(const void*) {}
  // Blocks with so many bytes that are on a multiprocessor at once.
  int64_t blocks(int, size_t bytes) const {
    return std::min<int64_t>(emulate::kBlocksOfOne, emulate::kChip / (bytes + emulate::kChipOfBlock));
  }
};
inline int current_device() { return 0; }

template <class... P, class... A>
void launch_together(const char*, void (*kernel)(P...), const Together& of, int threads, Stream, const A&... args) {
  emulate::run_together(static_cast<unsigned>(of.blocks), threads, 1, of.bytes, [&] { kernel(args...); });
}
#else
// All threads of all blocks arrive before one goes on, which then sees what they wrote.
__device__ inline void sync_grid() { cooperative_groups::this_grid().sync(); }
__device__ inline uint4* dynamic_shared() {
  extern __shared__ uint4 memory[];
  return memory;
}

inline int current_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

struct Chip {
  int64_t multiprocessors = 0;
  size_t bytes = 0;
  const void* kernel;
  explicit Chip(const void* k) : kernel(k) {
    const int device = current_device();
    int cooperative = 0, processors = 0, most = 0;
    cudaFuncAttributes own{};
    const auto ask = [&](int& to, cudaDeviceAttr what) {
      return cudaDeviceGetAttribute(&to, what, device) == cudaSuccess;
    };
    if (!ask(cooperative, cudaDevAttrCooperativeLaunch) || !cooperative ||
        !ask(processors, cudaDevAttrMultiProcessorCount) || !ask(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) ||
        cudaFuncGetAttributes(&own, kernel) != cudaSuccess)
      return;
    const int dynamic = most - static_cast<int>(own.sharedSizeBytes);
    if (dynamic <= 0 ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic) != cudaSuccess ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) !=
            cudaSuccess)
      return;
    multiprocessors = processors;
    bytes = static_cast<size_t>(dynamic);
  }
  int64_t blocks(int threads, size_t of) const {
    int found = 0;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, of) == cudaSuccess ? found : 0;
  }
};

template <class... P, class... A>
void launch_together(const char* name, void (*kernel)(P...), const Together& of, int threads, Stream stream,
                     const A&... args) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(of.blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = of.bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) fail(name, cudaGetErrorString(error));
}
#endif

// How the current device does `works` pieces of work, each with `bytes` of dynamic shared memory that it keeps, in turn
// by blocks that are all there at once: the most blocks for which that memory is there.
inline Together blocks_for(const Chip& chip, int threads, int64_t works, size_t bytes) {
  if (chip.multiprocessors == 0) return {};
  for (int64_t each = chip.blocks(threads, 0); each > 0; --each) {
    const int64_t blocks = std::min(works, each * chip.multiprocessors);
    const size_t own = static_cast<size_t>((works + blocks - 1) / blocks) * bytes;
    if (own <= chip.bytes && chip.blocks(threads, own) >= each) return {blocks, own};
  }
  return {};
}

template <class... P>
Together together(void (*kernel)(P...), int threads, int64_t works, size_t bytes) {
  using Key = std::tuple<int, const void*, int64_t, size_t>;
  static std::mutex mutex;
  static std::map<Key, Together> known;
  const auto* of = reinterpret_cast<const void*>(kernel);
  const Key key{current_device(), of, works, bytes};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = blocks_for(Chip(of), threads, works, bytes);
}

}  // namespace tsmem::cuda
