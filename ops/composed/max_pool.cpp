// The raw max pooling ops by PyTorch's operators: positions in a window are kept in place of 64-bit indices, and of the
// input.
#include "composed/composed.h"
#include "pool_layout.h"
#include "pool_windows.h"

namespace tsmem::composed {
namespace {

using at::IntArrayRef;
using at::Tensor;

// PyTorch's flag, which these sizes of the output came from.
bool ceil_mode(IntArrayRef space, const Windows& w) {
  for (size_t i = 0; i < space.size(); ++i)
    if (w.out[i] > (space[i] + 2 * w.padding[i] - w.dilation[i] * (w.kernel[i] - 1) - 1) / w.stride[i] + 1) return true;
  return false;
}

// The output and indices into the flattened space. A pool of one dimension is one of two, of height 1.
std::tuple<Tensor, Tensor> pool(const Tensor& x, const Windows& w) {
  const bool adaptive = w.kernel.empty();
  if (x.dim() == 3) {
    const auto with_one = [&](const std::vector<int64_t>& of, int64_t one) {
      return adaptive ? of : std::vector<int64_t>{one, of[0]};
    };
    const auto [y, index] = pool(
        x.unsqueeze(2),
        {with_one(w.kernel, 1), with_one(w.stride, 1), with_one(w.padding, 0), with_one(w.dilation, 1), {1, w.out[0]}});
    return {y.squeeze(2), index.squeeze(2)};
  }
  if (adaptive) return x.dim() == 4 ? at::adaptive_max_pool2d(x, w.out) : at::adaptive_max_pool3d(x, w.out);
  const bool up = ceil_mode(x.sizes().slice(2), w);
  return x.dim() == 4 ? at::max_pool2d_with_indices(x, w.kernel, w.stride, w.padding, w.dilation, up)
                      : at::max_pool3d_with_indices(x, w.kernel, w.stride, w.padding, w.dilation, up);
}

std::tuple<Tensor, Tensor> max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                    IntArrayRef dilation, IntArrayRef out, bool positions) {
  const Windows w{kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), out.vec()};
  const auto format = format_of(x, kernel.empty());
  const auto space = x.sizes().slice(2);
  const auto [y, index] = pool(contiguous_in(x, format), w);
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::isIntegralType(index.scalar_type(), /*includeBool=*/false) && index.sizes() == y.sizes(),
      "tsmem: max pooling on ", x.device().type(),
      " gives no indices that tsmem knows; leave the patterns max-pool and bn-act-max-pool out.");
  const auto dtype = position_type(make_axes(space, w)) == at::kByte ? at::kByte : at::kInt;
  return {contiguous_in(y, format), positions ? contiguous_in(positions_of(index, space, w).to(dtype), format)
                                              : at::empty({0}, x.options().dtype(at::kByte))};
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& position, IntArrayRef space, IntArrayRef kernel,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const Windows w{kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), grad.sizes().slice(2).vec()};
  return contiguous_in(gradient_at(indices_of(position, space, w), grad, space, w),
                       format_for(channels_last, grad.dim()));
}

}  // namespace

void register_max_pool(torch::Library& m, c10::DispatchKey key) {
  if (key == c10::DispatchKey::HPU) return;  // what it calls indices are positions of its own
  m.impl("_max_pool", key, TORCH_FN(max_pool));
  m.impl("_max_pool_backward", key, TORCH_FN(max_pool_backward));
}

}  // namespace tsmem::composed
