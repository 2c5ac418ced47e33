// Where the windows of a max pool lie, axis by axis.
#pragma once
#include <ATen/ATen.h>

#include <vector>

namespace tsmem {

// The windows of a pool, one entry an axis of space. Adaptive where `kernel` is empty: only `out` counts then.
struct Windows {
  std::vector<int64_t> kernel, stride, padding, dilation, out;
};

// One axis laid out: output o looks at the inputs start[o] + k * dilation for first[o] <= k < last[o], all of them
// inside.
struct Axis {
  std::vector<int64_t> start, first, last;
  int64_t in = 1, window = 1, dilation = 1, stride = 0;

  bool has_empty_window() const {
    for (size_t o = 0; o < start.size(); ++o)
      if (first[o] >= last[o]) return true;
    return false;
  }
};

Axis make_axis(int64_t in, const Windows& w, size_t axis);
std::vector<Axis> make_axes(at::IntArrayRef space, const Windows& w);

// Positions in the largest window.
int64_t volume_of(const std::vector<Axis>& axes);

// Of the positions in the windows.
at::ScalarType position_type(const std::vector<Axis>& axes);

// Where in the flattened space each of these positions in windows is, and the other way round. [batch, channels,
// w.out...] of integers, in int64; by PyTorch's operators, on any device.
at::Tensor indices_of(const at::Tensor& positions, at::IntArrayRef space, const Windows& w);
at::Tensor positions_of(const at::Tensor& indices, at::IntArrayRef space, const Windows& w);

// The gradient of the input from these indices: differentiable. [batch, channels, space...]
at::Tensor gradient_at(const at::Tensor& indices, const at::Tensor& grad, at::IntArrayRef space, const Windows& w);

}  // namespace tsmem
