// Batch norm kernels on a CUDA device: statistics, normalise + (add) + activation, and the two passes of their
// backward.
//
// A feature map is seen as [outer, channels, inner] (`planar`, inner > 1) or as [outer, channels] rows (inner = 1:
// channels_last and matrices), dense. Masks have bit e % 8 of byte e / 8 for element e, in the order of memory.
#pragma once
#include "act.h"
#include "cuda/args.h"

namespace tsmem::cuda {

// Numbers per channel are double for f64, else float.
struct NormArgs {
  Dtype dtype = Dtype::f32;
  bool aligned = false;  // all maps start at multiples of 16 bytes
  int64_t outer = 0, channels = 0, inner = 1, numel = 0;
  Divider by_inner, by_channels;
  Act act;
  bool from_mask = false;       // backward takes the activation's derivative from `mask`, not from x (and other)
  const void* x = nullptr;      // input
  const void* other = nullptr;  // residual, or null
  const void* grad = nullptr;   // gradient of the output
  void* out = nullptr;          // output (forward; may be x or other), gradient of the input (backward; may be grad)
  void* grad_other = nullptr;   // gradient of the pre-activation, or null; may be grad
  uint8_t* mask = nullptr;      // bits of the activation, or null
  // pre = (x - mean) * invstd * weight + bias; no mean: pre = x
  const void *mean = nullptr, *invstd = nullptr;
  Numbers weight, bias;
  // gradient of x = invstd * weight * grad_pre - ((x - mean) * tilt + level); null: both 0, and x is not read
  const void *tilt = nullptr, *level = nullptr;
  bool planar() const { return inner > 1; }
};

// How a reduction over each channel is split: over `segments` of the outer dimension, whose sums stay apart, and over
// `parts` of a segment, whose sums a second kernel adds in order: results depend on nothing but the shape.
struct Split {
  int64_t segments = 1;
  int64_t over_outer = 1, over_inner = 1;  // parts = their product
  bool fits = false;                       // indices within a part are below 2^32
  Block block;
  __host__ __device__ int64_t parts() const { return over_outer * over_inner; }
};
Split split(const NormArgs&, int64_t segments);

// What finishes the statistics. Outputs are double for f64, else float.
struct StatsArgs {
  const double* partial = nullptr;  // [parts, channels, 3]: count, mean, sum of squared deviations
  int64_t parts = 0;                // 0: not training, the running statistics are used
  int64_t channels = 0;
  Numbers running_mean, running_var;
  double momentum = 0, eps = 0;
  bool f64 = false;
  void *mean = nullptr, *invstd = nullptr;
};

// partial: [parts, channels, 3] doubles.
void norm_stats(const NormArgs&, const Split&, double* partial, Stream);
// Mean, inverse deviation, and, in training, the running statistics.
void norm_finish_stats(const StatsArgs&, Stream);
// out = act(pre + other), and mask.
void norm_apply(const NormArgs&, Stream);

// Sums over each channel of grad_pre and of grad_pre * (x - mean) (x null: only the first). Writes grad_other. partial:
// [parts, channels, 2] doubles.
void norm_reduce(const NormArgs&, const Split&, double* partial, Stream);
struct SumsArgs {
  const double* partial = nullptr;
  int64_t parts = 0, channels = 0;
  double count = 0;  // elements of a channel
  bool f64 = false;
  const void* invstd = nullptr;
  Numbers weight;
  void *grad_weight = nullptr, *grad_bias = nullptr, *tilt = nullptr, *level = nullptr;  // or null
};
void norm_finish_sums(const SumsArgs&, Stream);
// out = the gradient of x, where there is `out`; writes grad_other.
void norm_grad(const NormArgs&, Stream);

// The same by one kernel that keeps the map on chip (norm_persistent.cu), to the bit: norm_stats, norm_finish_stats and
// norm_apply; norm_reduce, norm_finish_sums and norm_grad, of which `second` is for norm_grad. What the statistics and
// the sums go to is what a.mean, a.invstd, second.tilt and second.level name. from_first: second.grad is what the first
// pass writes to grad_other, and is read from no memory.
// For rows of whole octets, not of f64 (norm_can_be_kept), and as many as the current device has room for.
bool norm_can_be_kept(const NormArgs&);
bool norm_forward_fits(const NormArgs&);
void norm_forward(const NormArgs&, const Split&, const StatsArgs&, double* partial, Stream);
bool norm_backward_fits(const NormArgs&);
void norm_backward(const NormArgs&, const NormArgs& second, const Split&, const SumsArgs&, double* partial,
                   bool from_first, Stream);

// out[s, c] = the sum over segment s of grad * act(pre). partial: [parts, segments, channels, 2] doubles.
void norm_scale_grad(const NormArgs&, const Split&, double* partial, void* out, Stream);

}  // namespace tsmem::cuda
