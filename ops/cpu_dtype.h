// ATen's dtypes as the kernels name them.
#pragma once
#include <ATen/ATen.h>

#include "dtype.h"

namespace tsmem {

// The four dtypes that have kernels of ours.
inline bool has_cpu_dtype(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf;
}

// Throws for a dtype without kernels.
inline Dtype cpu_dtype(at::ScalarType t) {
  TORCH_CHECK(has_cpu_dtype(t), "tsmem: no kernel for ", t);
  return t == at::kFloat ? Dtype::f32 : t == at::kDouble ? Dtype::f64 : t == at::kBFloat16 ? Dtype::bf16 : Dtype::f16;
}

}  // namespace tsmem
