// Every kernel once on a device, without torch, for compute-sanitizer (bench/cuda.sh sanitize): the calls of cases.h.
#include <cstdio>
#include <cstdlib>

#include "act_table.h"
#include "cases.h"
#include "cuda/launch.h"

namespace tsmem::cuda {

void fail(const char* what, const char* why) {
  std::fprintf(stderr, "tsmem_cuda_cases: the kernel %s was refused: %s\n", what, why);
  std::exit(1);
}

namespace {

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::f16};

void run() {
  for (const Dtype dtype : kDtypes)
    for (const int64_t offset : {0, 1}) {
      for (const cases::Shape& shape : {cases::Shape{4, 3, 49}, {3, 5, 32}, {66, 33, 1}, {70, 8, 1}, {2, 1, 3001}})
        for (const ActKind kind : {ActKind::relu, ActKind::silu, ActKind::gelu})
          cases::norm(shape, dtype, kind, kind == ActKind::relu, one_bit(kind), offset);
      for (const int64_t n : {1, 1003, 9000}) {
        cases::masks(n, dtype, ActKind::relu, offset);
        cases::dropouts(n, dtype, offset);
      }
    }
  // More blocks of work than a device has blocks at once.
  cases::norm({20000, 264, 1}, Dtype::bf16, ActKind::relu, true, true);
  for (const Dtype dtype : kDtypes)
    for (const bool last : {false, true})
      for (const int64_t channels : {3, 8})
        for (const cases::Window& window : {cases::Window{3, 2, 1, 1}, {2, 2, 0, 1}, {3, 1, 1, 2}})
          cases::pools(2, channels, 9, 8, window, dtype, last, ActKind::relu);
}

}  // namespace
}  // namespace tsmem::cuda

int main() {
  tsmem::cuda::run();
#ifndef TSMEM_EMULATE_CUDA
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess)
    tsmem::cuda::fail("(any)", cudaGetErrorString(error));
#endif
  std::puts("Every kernel ran.");
}
