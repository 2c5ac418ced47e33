#include "pool_windows.h"

#include "pool_layout.h"

namespace tsmem {

Axis make_axis(int64_t in, const Windows& w, size_t axis) {
  Axis a;
  a.in = in;
  const int64_t out = w.out[axis];
  const bool adaptive = w.kernel.empty();
  if (!adaptive) a.stride = w.stride[axis], a.dilation = w.dilation[axis], a.window = w.kernel[axis];
  for (int64_t o = 0; o < out; ++o) {
    if (adaptive) {
      const int64_t start = o * in / out, end = ((o + 1) * in + out - 1) / out;
      a.start.push_back(start), a.first.push_back(0), a.last.push_back(end - start);
      a.window = std::max(a.window, end - start);
    } else {
      const int64_t start = o * a.stride - w.padding[axis];
      a.start.push_back(start);
      a.first.push_back(start < 0 ? (-start + a.dilation - 1) / a.dilation : 0);
      a.last.push_back(std::min(a.window, start >= in ? 0 : (in - 1 - start) / a.dilation + 1));
    }
  }
  return a;
}

std::vector<Axis> make_axes(at::IntArrayRef space, const Windows& w) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < space.size(); ++i) axes.push_back(make_axis(space[i], w, i));
  return axes;
}

int64_t volume_of(const std::vector<Axis>& axes) {
  int64_t volume = 1;
  for (const Axis& a : axes) volume *= a.window;
  return volume;
}

at::ScalarType position_type(const std::vector<Axis>& axes) { return tsmem::position_type(volume_of(axes)); }

// Where each window of an axis begins. Made on the device: a copy from here would wait for it.
static at::Tensor starts_of(size_t axis, at::IntArrayRef space, const Windows& w, const at::TensorOptions& options) {
  std::vector<int64_t> shape(space.size(), 1);
  shape[axis] = w.out[axis];
  const at::Tensor place = at::arange(w.out[axis], options).view(shape);
  return w.kernel.empty() ? (place * space[axis]).floor_divide(w.out[axis]) : place * w.stride[axis] - w.padding[axis];
}

at::Tensor indices_of(const at::Tensor& positions, at::IntArrayRef space, const Windows& w) {
  at::Tensor rest = positions.to(at::kLong), index = at::zeros_like(rest);
  const auto axes = make_axes(space, w);
  int64_t step = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    const at::Tensor k = rest.remainder(axes[i].window);
    index = index + (starts_of(i, space, w, rest.options()) + k * axes[i].dilation) * step;
    rest = rest.floor_divide(axes[i].window);
    step *= space[i];
  }
  return index;
}

at::Tensor positions_of(const at::Tensor& indices, at::IntArrayRef space, const Windows& w) {
  at::Tensor rest = indices, position = at::zeros_like(rest);
  const auto axes = make_axes(space, w);
  int64_t step = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    const at::Tensor from_start = rest.remainder(space[i]) - starts_of(i, space, w, rest.options());
    position = position + from_start.floor_divide(axes[i].dilation) * step;
    rest = rest.floor_divide(space[i]);
    step *= axes[i].window;
  }
  return position;
}

// Whether two windows may look at the same place.
static bool overlap(at::IntArrayRef space, const Windows& w) {
  for (size_t i = 0; i < space.size(); ++i)
    if (w.kernel.empty() ? w.out[i] > 0 && space[i] % w.out[i] != 0 : w.dilation[i] * (w.kernel[i] - 1) >= w.stride[i])
      return true;
  return false;
}

at::Tensor gradient_at(const at::Tensor& indices, const at::Tensor& grad, at::IntArrayRef space, const Windows& w) {
  const bool narrow = grad.scalar_type() == at::kHalf || grad.scalar_type() == at::kBFloat16;
  const auto sums = narrow && overlap(space, w) ? at::kFloat : grad.scalar_type();  // in 16 bits each would be rounded
  return at::zeros({grad.size(0), grad.size(1), c10::multiply_integers(space)}, grad.options().dtype(sums))
      .scatter_add(2, indices.flatten(2), grad.flatten(2).to(sums))
      .to(grad.scalar_type())
      .view(with_space(grad, space));
}

}  // namespace tsmem
