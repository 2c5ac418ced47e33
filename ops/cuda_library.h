// The CUDA kernels are a library of their own, so that this one needs no CUDA.
#pragma once

namespace tsmem {

// Loads libtsmem_ops_cuda.so from beside this library, once for the process; its raw ops are registered then. Where
// there is none, or it can't be loaded, the raw ops are composed of PyTorch's (composed/), and a warning says why.
void load_cuda_library();

}  // namespace tsmem
