// Shapes of the raw activation ops' results.
#include "common.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> act_mask_meta(const Tensor& x, int64_t, double, double) {
  return {at::empty_like(x), at::empty({(x.numel() + 7) / 8}, x.options().dtype(at::kByte))};
}

Tensor act_mask_backward_meta(const Tensor& grad, const Tensor&, int64_t, double, double, at::IntArrayRef strides,
                              const OptTensor&) {
  return at::empty_strided(grad.sizes(), strides, grad.options());
}

Tensor smooth_act_meta(const Tensor& x, const Act&) { return at::empty_like(x); }
Tensor smooth_act_backward_meta(const Tensor& grad, const Tensor&, const Act&, const OptTensor& out) {
  return out ? *out : at::empty_like(grad);
}

Tensor prelu_meta(const Tensor& x, const Tensor&, const OptTensor& out) { return out ? *out : at::empty_like(x); }
std::tuple<Tensor, Tensor> prelu_backward_meta(const Tensor&, const Tensor& x, const Tensor& weight,
                                               std::array<bool, 2> want, const OptTensor& out) {
  return {!want[0] ? Tensor() : out ? *out : at::empty_like(x), want[1] ? at::empty_like(weight) : Tensor()};
}

}  // namespace

void register_act_meta(torch::Library& m) {
  m.impl("_act_mask", c10::DispatchKey::Meta, TORCH_FN(act_mask_meta));
  m.impl("_act_mask_backward", c10::DispatchKey::Meta, TORCH_FN(act_mask_backward_meta));
  m.impl("_smooth_act", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&smooth_act_meta>::call)));
  m.impl("_smooth_act_backward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&smooth_act_backward_meta>::call)));
  m.impl("_prelu", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&prelu_meta>::call)));
  m.impl("_prelu_backward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&prelu_backward_meta>::call)));
}

}  // namespace tsmem
