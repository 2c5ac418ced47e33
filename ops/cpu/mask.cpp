#include "cpu/mask.h"

namespace tsmem {

namespace baseline {
extern const MaskKernels mask_kernels_table;
}
namespace avx2 {
extern const MaskKernels mask_kernels_table;
}
namespace avx512 {
extern const MaskKernels mask_kernels_table;
}

const MaskKernels& mask_kernels() {
  return choose(baseline::mask_kernels_table, avx2::mask_kernels_table, avx512::mask_kernels_table);
}

}  // namespace tsmem
