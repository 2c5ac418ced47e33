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

}  // namespace tsmem
