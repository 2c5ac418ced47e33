// Shapes of the raw max pooling ops' results.
#include "pool_layout.h"
#include "pool_windows.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;

std::tuple<Tensor, Tensor> max_pool_meta(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                         IntArrayRef dilation, IntArrayRef out, bool positions) {
  const auto axes =
      make_axes(x.sizes().slice(2), {kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), out.vec()});
  const auto sizes = with_space(x, out);
  const auto format = format_of(x, kernel.empty());
  Tensor y = empty_in(sizes, format, x.options());
  Tensor position = positions ? empty_in(sizes, format, x.options().dtype(position_type(axes)))
                              : at::empty({0}, x.options().dtype(at::kByte));
  return {y, position};
}

Tensor max_pool_backward_meta(const Tensor& grad, const Tensor&, IntArrayRef space, IntArrayRef, IntArrayRef,
                              IntArrayRef, IntArrayRef, bool channels_last) {
  return empty_in(with_space(grad, space), format_for(channels_last, grad.dim()), grad.options());
}

}  // namespace

void register_max_pool_meta(torch::Library& m) {
  m.impl("_max_pool", c10::DispatchKey::Meta, TORCH_FN(max_pool_meta));
  m.impl("_max_pool_backward", c10::DispatchKey::Meta, TORCH_FN(max_pool_backward_meta));
}

}  // namespace tsmem
