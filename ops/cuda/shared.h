// Memory that the threads of a block share.
#pragma once
#include "cuda/args.h"

namespace tsmem::cuda {

// The block's own T, one for each Use; it holds anything before it is written. Emulated, memory that is new for each
// block.
template <class Use, class T>
__device__ inline T& shared() {
#ifdef TSMEM_EMULATE_CUDA
  static char name;
  return *static_cast<T*>(emulate::shared(&name, sizeof(T)));
#else
  __shared__ T memory;
  return memory;
#endif
}

}  // namespace tsmem::cuda
