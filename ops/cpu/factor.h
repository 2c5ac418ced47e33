// A matrix that a few rows at a time are multiplied with, again and again.
#pragma once
#include <ATen/ATen.h>

namespace tsmem {

struct Factor {
  at::Tensor matrix;  // [depth, columns]
  at::Tensor panels;  // of it (cpu/product.h); undefined: products are PyTorch's
};

// For `times` products. In float and double, where they are worth the copy, the matrix becomes panels: BLAS lays out
// its operands in each call, with which products of 8 to 16 rows take up to twice the time.
Factor factor_of(const at::Tensor& matrix, int64_t times);

// out = start + a matrix, for a [rows, depth] whose rows' elements lie side by side, as those of `out`. `start` may be
// undefined (zeros), `out` itself, or one row [columns] for all.
void multiply(const at::Tensor& out, const at::Tensor& start, const at::Tensor& a, const Factor& factor);

}  // namespace tsmem
