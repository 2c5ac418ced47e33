// libtsmem_ops_cuda.so: loaded by libtsmem_ops.so when an op first sees a CUDA tensor (cuda_library.cpp).
#include "cuda/raw_ops.h"

TORCH_LIBRARY_IMPL(tsmem, CUDA, m) {
  tsmem::cuda::implement_norm(m);
  tsmem::cuda::implement_pool(m);
  tsmem::cuda::implement_mask(m);
  tsmem::cuda::implement_dropout(m);
  tsmem::cuda::implement_graph(m);
#ifdef TSMEM_CUDNN
  tsmem::cuda::implement_cudnn(m);
#endif
  tsmem::cuda::implement_ways(m);
}
