// Max pooling on a CUDA device with the position in the window in place of a 64-bit index, and the same of act(pre),
// where pre is a batch norm (norm.h).
#pragma once
#include "cuda/norm.h"

namespace tsmem::cuda {

// One axis of the windows: output o looks at the inputs start(o) + k * dilation for first(o) <= k < last(o).
struct PoolAxis {
  int64_t in = 1, out = 1;
  int64_t window = 1;  // the number of k that positions count with: the largest last(o)
  int64_t stride = 1, padding = 0, dilation = 1;
  bool adaptive = false;

  Divider by_stride, by_dilation, by_window, by_in, by_out;  // of prepare()

  // Before use. volume: of the whole window.
  void prepare(int64_t volume) {
    const int64_t reach = in + 2 * padding + window * dilation + stride;
    by_stride = Divider(stride, reach);
    by_dilation = Divider(dilation, reach);
    by_window = Divider(window, volume);
    by_in = Divider(in, (in + 1) * (out + 1));
    by_out = Divider(out, (in + 1) * (out + 1));
  }
  __host__ __device__ int64_t start(int64_t o) const { return adaptive ? by_out.divide(o * in) : o * stride - padding; }
  __host__ __device__ int64_t first(int64_t o) const {
    const int64_t s = start(o);
    return s < 0 ? by_dilation.divide(-s + dilation - 1) : 0;
  }
  __host__ __device__ int64_t last(int64_t o) const {
    const int64_t s = start(o);
    if (adaptive) return by_out.divide((o + 1) * in + out - 1) - s;
    const int64_t inside = s >= in ? 0 : by_dilation.divide(in - 1 - s) + 1;
    return inside < window ? inside : window;
  }
  // The outputs whose windows can hold input i: [begin, end).
  __host__ __device__ int64_t outputs_begin(int64_t i) const {
    if (adaptive) return by_in.divide(i * out);
    const int64_t reach = i + padding - (window - 1) * dilation;
    return reach <= 0 ? 0 : by_stride.divide(reach + stride - 1);
  }
  __host__ __device__ int64_t outputs_end(int64_t i) const {
    const int64_t end = adaptive ? by_in.divide((i + 1) * out + in - 1) : by_stride.divide(i + padding) + 1;
    return end < out ? end : out;
  }
  // The k for which output o looks at input i, of outputs_begin() to outputs_end(); -1: none.
  __host__ __device__ int64_t tap(int64_t i, int64_t o) const {
    const int64_t distance = i - start(o), k = by_dilation.divide(distance);
    return k * dilation == distance && k < window ? k : -1;
  }
};

// A position is (kd * window_h + kh) * window_w + kw, kept in position_bytes = 1, 2 or 4 bytes. Layouts: [batch,
// channels, d, h, w], or channels last: [batch, d, h, w, channels].
struct PoolArgs {
  NormArgs norm;  // dtype, aligned, channels, and for the pools of a norm: its coefficients, tilt and level
  bool channels_last = false;
  int32_t position_bytes = 1;
  int64_t batch = 0;
  PoolAxis d, h, w;
  Divider by_channels, by_d, by_h, by_w;  // of outputs (forward, reduce) or inputs (backward)
  const void* x = nullptr;
  const void* grad = nullptr;  // of the output
  void* out = nullptr;
  void* positions = nullptr;  // or null
  int64_t outputs() const { return batch * norm.channels * d.out * h.out * w.out; }
  int64_t inputs() const { return batch * norm.channels * d.in * h.in * w.in; }
};

// Prepares the axes, and the divisors of the indices of outputs, or of inputs.
void prepare(PoolArgs&, bool of_outputs);

// out and positions. Ties go to the first, NaN wins, the last NaN of several; a window of -inf has the position of its
// first element.
void pool_forward(const PoolArgs&, Stream);
// out = the gradient of x: each input adds what it was the maximum of, in the order of the outputs, in float (double
// for f64).
void pool_backward(const PoolArgs&, Stream);

// The same of act(pre).
void norm_pool_forward(const PoolArgs&, Stream);
// out again, from x and positions.
void norm_pool_again(const PoolArgs&, Stream);
// Sums over each channel of grad_pre and grad_pre * (x - mean). norm's outer and inner are the output's. partial:
// [parts, channels, 2] doubles.
void norm_pool_reduce(const PoolArgs&, const Split&, double* partial, Stream);
// out = the gradient of x.
void norm_pool_backward(const PoolArgs&, Stream);

}  // namespace tsmem::cuda
