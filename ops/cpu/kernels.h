// Kernels without torch headers, compiled once an instruction set (ops/CMakeLists.txt) and chosen at run time.
//
// A family NAME has two files: NAME.h declares a struct of function pointers and `const NameKernels& name_kernels()`;
// NAME.kernel.cpp defines the functions in namespace tsmem::TSMEM_ISA with one `extern const NameKernels
// name_kernels_table`. kernels.kernel.cpp lists the families, kernels.cpp chooses. Kernels work on a range, so that
// callers split work with at::parallel_for.
#pragma once
#include "dtype.h"

namespace tsmem {

struct MaskKernels;
struct NormKernels;
struct NormPoolKernels;
struct PoolKernels;
struct PreluKernels;
struct ProductKernels;
struct RnnKernels;
struct SmoothActKernels;

// All families, compiled for one instruction set.
struct Kernels {
  const MaskKernels* mask;
  const NormKernels* norm;
  const NormPoolKernels* norm_pool;
  const PoolKernels* pool;
  const PreluKernels* prelu;
  const ProductKernels* product;
  const RnnKernels* rnn;
  const SmoothActKernels* smooth_act;
};

// Those for the best instruction set of this machine; TSMEM_ISA=baseline|avx2|avx512 in the environment asks for a
// lesser one.
const Kernels& kernels();

}  // namespace tsmem
