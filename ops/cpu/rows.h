// Rows of a matrix as kernels take them: row i begins `stride` elements after row i - 1, and its elements lie side by
// side.
#pragma once
#include <cstdint>

namespace tsmem {

// A stride of 0 is one row for all.
struct Rows2d {
  const void* data;
  int64_t stride;
};
struct MutableRows2d {
  void* data;  // null: not wanted
  int64_t stride;
};

}  // namespace tsmem
