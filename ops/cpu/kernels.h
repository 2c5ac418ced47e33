// Kernels without torch headers, compiled once an instruction set (ops/CMakeLists.txt) and chosen at run time.
//
// A family NAME has three files: NAME.h declares a struct of function pointers and `const NameKernels& name_kernels()`;
// NAME.kernel.cpp defines the functions in namespace tsmem::TSMEM_ISA with one `extern const NameKernels
// name_kernels_table`; NAME.cpp picks the table with choose(). Kernels work on a range, so that callers split work with
// at::parallel_for.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace tsmem {

enum class Isa { baseline, avx2, avx512 };

// The best instruction set of this machine; TSMEM_ISA=baseline|avx2|avx512 in the environment asks for a lesser one.
Isa isa();

template <class Table>
const Table& choose(const Table& baseline, const Table& avx2, const Table& avx512) {
  return isa() == Isa::avx512 ? avx512 : isa() == Isa::avx2 ? avx2 : baseline;
}

}  // namespace tsmem
