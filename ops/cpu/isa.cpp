#include <cstdlib>
#include <string>

#include "cpu/kernels.h"

namespace tsmem {

static Isa detect() {
  Isa best = Isa::baseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
  if (best == Isa::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = Isa::avx512;
  const char* asked = std::getenv("TSMEM_ISA");
  if (asked && std::string(asked) == "baseline") return Isa::baseline;
  if (asked && std::string(asked) == "avx2") return best == Isa::baseline ? best : Isa::avx2;
  return best;
}

Isa isa() {
  static const Isa chosen = detect();
  return chosen;
}

}  // namespace tsmem
