#include "cpu/kernels.h"

#include <cstdlib>
#include <string>

#include "cpu/mask.h"
#include "cpu/norm.h"
#include "cpu/pool.h"
#include "cpu/prelu.h"
#include "cpu/product.h"
#include "cpu/rnn.h"
#include "cpu/smooth_act.h"

namespace tsmem {

namespace baseline {
extern const Kernels all_kernels;
}
#ifdef __x86_64__
namespace avx2 {
extern const Kernels all_kernels;
}
namespace avx512 {
extern const Kernels all_kernels;
}
#endif

namespace {

const Kernels& best_kernels() {
#ifdef __x86_64__
  const char* value = std::getenv("TSMEM_ISA");
  const std::string asked = value ? value : "";
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && asked != "avx2" && asked != "baseline") return avx512::all_kernels;
  if (avx2 && asked != "baseline") return avx2::all_kernels;
#endif
  return baseline::all_kernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& best = best_kernels();
  return best;
}

const MaskKernels& mask_kernels() { return *kernels().mask; }
const NormKernels& norm_kernels() { return *kernels().norm; }
const NormPoolKernels& norm_pool_kernels() { return *kernels().norm_pool; }
const PoolKernels& pool_kernels() { return *kernels().pool; }
const PreluKernels& prelu_kernels() { return *kernels().prelu; }
const ProductKernels& product_kernels() { return *kernels().product; }
const RnnKernels& rnn_kernels() { return *kernels().rnn; }
const SmoothActKernels& smooth_act_kernels() { return *kernels().smooth_act; }

}  // namespace tsmem
