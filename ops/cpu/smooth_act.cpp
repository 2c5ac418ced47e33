#include "cpu/smooth_act.h"

namespace tsmem {

namespace baseline {
extern const SmoothActKernels smooth_act_kernels_table;
}
namespace avx2 {
extern const SmoothActKernels smooth_act_kernels_table;
}
namespace avx512 {
extern const SmoothActKernels smooth_act_kernels_table;
}

const SmoothActKernels& smooth_act_kernels() {
  return choose(baseline::smooth_act_kernels_table, avx2::smooth_act_kernels_table, avx512::smooth_act_kernels_table);
}

}  // namespace tsmem
