// Batch norm kernels: statistics, normalise + (add) + activation, and the two passes of their backward.
//
// A feature map is seen as [outer, channels, inner] (`planar`, inner > 1) or as [outer, channels] rows (`inner` = 1:
// channels_last and matrices), dense. Kernels work on chunks that stay in the L1 cache: convert to float, normalise,
// activate, convert and store; so each activation and each dtype is compiled once, not their product.
#pragma once
#include <cstdint>

#include "act.h"
#include "cpu/kernels.h"

namespace tsmem {

// Elements are of `dtype`; numbers per channel are double for f64, else float. With rows, the per-channel arrays are
// repeated up to `period` elements: a multiple of channels and of 16, so that narrow rows fill vectors and a period of
// masks starts at a byte.
struct NormArgs {
  Dtype dtype = Dtype::f32;
  int64_t outer = 0, channels = 0, inner = 1, period = 0;
  Act act;
  bool from_mask = false;       // backward takes the activation's derivative from `mask`, not from x (and other)
  bool stream = false;          // out is large and no input's memory: better written past the caches
  const void* x = nullptr;      // input
  const void* other = nullptr;  // residual, or null
  const void* grad = nullptr;   // gradient of the output
  void* out = nullptr;          // output (forward; may be x or other), gradient of the input (backward; may be grad)
  void* grad_other = nullptr;   // gradient of the pre-activation, or null; may be grad
  uint8_t* mask = nullptr;      // a bit an element (act_flags), or null; see mask_bytes()
  // pre = (x - mean) * scale + bias
  const void *mean = nullptr, *scale = nullptr, *bias = nullptr;
  // gradient of x = slope * grad_pre - ((x - mean) * tilt + level); tilt and level null: both 0, and x is not read
  const void *slope = nullptr, *tilt = nullptr, *level = nullptr;
  bool planar() const { return inner > 1; }
  // Masks are padded to whole bytes: each (outer, channel) row of a planar map by itself, rows as one run.
  int64_t mask_bytes() const { return planar() ? outer * channels * ((inner + 7) / 8) : (outer * channels + 7) / 8; }
};

// A part of a feature map: outer range [o0, o1), and, for planar maps, channel range [c0, c1). With rows c0 = 0, c1 =
// channels, and o0 is a multiple of 8 where a mask is written or read.
struct NormRange {
  int64_t o0, o1, c0, c1;
};

struct NormKernels {
  // Mean and sum of squared deviations of each channel over the range, at index c - c0. One pass, shifted, merged in
  // double.
  void (*stats)(const NormArgs&, NormRange, double* mean, double* m2);
  // The same for one channel, in double and two passes: where the fast one met infinities or overflow.
  void (*exact_stats)(const NormArgs&, int64_t channel, double* mean, double* m2);
  // out = act(pre + other), and mask.
  void (*apply)(const NormArgs&, NormRange);
  // Sums over the range of grad_pre and of grad_pre * (x - mean), at index c - c0; x null: only the first. Writes
  // grad_other.
  void (*reduce)(const NormArgs&, NormRange, double* sum, double* dot);
  // out = the gradient of x. out may be grad.
  void (*grad)(const NormArgs&, NormRange);
  // dot[(o - o0) * (c1 - c0) + c - c0] (planar) or dot[c] (rows) = sum of grad * act(pre); mean null: pre = x.
  void (*dot)(const NormArgs&, NormRange, double* dot);
};

const NormKernels& norm_kernels();

// Max pooling of act((x - mean) * scale + bias) over [outer, channels, height, width] (planar) or [outer, height,
// width, channels].
struct NormPoolArgs {
  NormArgs norm;      // as for the unpooled map; out (forward) and grad (backward) are the pooled map's
  bool rows = false;  // channels_last
  int64_t images = 0, height = 0, width = 0, out_height = 0, out_width = 0;
  int64_t kernel[2] = {1, 1}, stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  void* positions = nullptr;  // where in its window each output lies, row by row
  int position_bytes = 1;     // 1, 2 or 4
};

struct NormPoolKernels {
  // Planes [p0, p1): (image, channel) pairs (planar) or images (rows).
  void (*forward)(const NormPoolArgs&, int64_t p0, int64_t p1);
  // The output of forward again, from x and the positions.
  void (*again)(const NormPoolArgs&, int64_t p0, int64_t p1);
  // Sums of grad_pre and grad_pre * (x - mean) into sum[c], dot[c] (added).
  void (*reduce)(const NormPoolArgs&, int64_t p0, int64_t p1, double* sum, double* dot);
  void (*grad)(const NormPoolArgs&, int64_t p0, int64_t p1);
};

const NormPoolKernels& norm_pool_kernels();

}  // namespace tsmem
