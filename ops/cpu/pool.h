// Max pooling with the position in the window in place of a 64-bit index.
#pragma once
#include "cpu/kernels.h"

namespace tsmem {

// One axis of the windows: output o looks at the inputs start[o] + k * dilation for first[o] <= k < last[o], all of
// them inside.
struct PoolAxis {
  int64_t in = 1, out = 1;
  int64_t window = 1;  // the number of k that positions count with: the largest last[o]
  int64_t dilation = 1;
  int64_t stride = 0;  // where start[o] = start[0] + o * stride; 0 where the windows vary
  const int64_t* start = nullptr;
  const int64_t* first = nullptr;
  const int64_t* last = nullptr;
};

// A position is (kd * window_h + kh) * window_w + kw, kept in position_bytes = 1, 2 or 4 bytes. Layouts: [batch,
// channels, d, h, w], or channels last: [batch, d, h, w, channels].
struct PoolArgs {
  Dtype dtype;
  int32_t position_bytes;
  bool channels_last;
  int64_t batch, channels;
  PoolAxis d, h, w;
};

struct PoolKernels {
  // Rows of the output [begin, end): planar, a row is one of batch * channels * d.out * h.out; channels last, of batch
  // * d.out * h.out. Ties go to the first, NaN wins, the last NaN of several; a window of -inf has the position of its
  // first element. position may be null.
  void (*forward)(const PoolArgs& args, const void* x, void* y, void* position, int64_t begin, int64_t end);
  // Units [begin, end) of grad_x, which this sets: planar, batch * channels planes; channels last, batch * blocks where
  // block b has the channels [b * channels / blocks, (b + 1) * channels / blocks). Adds in the order of the outputs, in
  // the tensor's own dtype, as PyTorch does.
  void (*backward)(const PoolArgs& args, int64_t blocks, const void* grad_y, const void* position, void* grad_x,
                   int64_t begin, int64_t end);
};

const PoolKernels& pool_kernels();

}  // namespace tsmem
