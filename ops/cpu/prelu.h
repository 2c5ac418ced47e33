// Leaky ReLUs whose slopes are parameters: one, or one a channel.
#pragma once
#include <cstdint>

#include "cpu/kernels.h"

namespace tsmem {

// A dense map seen as [outer, channels, inner]; inner is 1 where channels are innermost.
struct PreluArgs {
  Dtype dtype = Dtype::f32;
  int64_t channels = 1, inner = 1;
  const void* weight = nullptr;  // a slope a channel: double for f64, else float
  const void* x = nullptr;
  const void* grad = nullptr;  // of the output
  void* out = nullptr;         // output, or the gradient of x; may be x, or grad; backward: null where not asked for
};

struct PreluKernels {
  // Elements [begin, end). Where inner is 1, begin is a multiple of channels.
  void (*forward)(const PreluArgs&, int64_t begin, int64_t end);
  // Adds to sums[channel] the gradient of its slope; sums may be null.
  void (*backward)(const PreluArgs&, int64_t begin, int64_t end, double* sums);
};

const PreluKernels& prelu_kernels();

}  // namespace tsmem
