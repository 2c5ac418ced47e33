#include "cpu/pool.h"

namespace tsmem {

namespace baseline {
extern const PoolKernels pool_kernels_table;
}
namespace avx2 {
extern const PoolKernels pool_kernels_table;
}
namespace avx512 {
extern const PoolKernels pool_kernels_table;
}

const PoolKernels& pool_kernels() {
  return choose(baseline::pool_kernels_table, avx2::pool_kernels_table, avx512::pool_kernels_table);
}

}  // namespace tsmem
