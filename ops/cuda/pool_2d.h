// Max pooling of the common kind (pool.h), in 32-bit numbers: two dimensions, no dilation, windows of at most 256
// elements, fewer than 2^31 elements, no norm or one with ReLU. The others are pool.cu's.
#pragma once
#include "cuda/pool.h"

namespace tsmem::cuda {

// Whether it is of that kind; norm: whether it is a batch norm's.
bool is_common_2d(const PoolArgs&, bool norm);

// As pool_forward() and norm_pool_forward(), pool_backward() and norm_pool_backward() of pool.h.
void pool_2d_forward(const PoolArgs&, bool norm, Stream);
void pool_2d_backward(const PoolArgs&, bool norm, Stream);

}  // namespace tsmem::cuda
