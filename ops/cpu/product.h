// Products of a few rows with a matrix that is used again and again. The matrix is laid out once as panels: some
// columns of it, each of its rows beside the next.
#pragma once
#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace tsmem {

// out [rows, columns] = start + a [rows, depth] b [depth, columns], in float or double. `out` may be `start`.
struct ProductArgs {
  Dtype dtype;
  int64_t rows, depth, columns;
  Rows2d a;
  const void* panels;  // of b
  Rows2d start;        // null: zeros
  MutableRows2d out;
};

struct ProductKernels {
  // How many columns a panel has.
  int64_t (*panel_columns)(Dtype dtype);
  // Panels [first, last) of b, whose element (i, j) is b[i * row_stride + j * column_stride]. Columns that the last
  // panel lacks are zeros.
  void (*pack)(Dtype dtype, const void* b, int64_t row_stride, int64_t column_stride, int64_t depth, int64_t columns,
               void* panels, int64_t first, int64_t last);
  // The columns of panels [first, last).
  void (*multiply)(const ProductArgs&, int64_t first, int64_t last);
};

const ProductKernels& product_kernels();

}  // namespace tsmem
