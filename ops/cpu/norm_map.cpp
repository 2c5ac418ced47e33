#include "cpu/norm_map.h"

#include <fstream>
#include <limits>

namespace tsmem::cpu {

int64_t stream_bytes() {
  static const int64_t kib = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t n = 0;
    return file >> n && file.get() == 'K' ? n : std::numeric_limits<int64_t>::max() / 1024;
  }();
  return kib * 1024 / 16;
}

}  // namespace tsmem::cpu
