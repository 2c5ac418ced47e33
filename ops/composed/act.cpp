// The raw ops of one bit an element by PyTorch's operators.
#include "activation.h"
#include "common.h"
#include "composed/composed.h"
#include "composed/derivative.h"
#include "layout.h"

namespace tsmem::composed {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> act_mask(const Tensor& x, int64_t kind, double a, double b) {
  const Act act = act_of(kind, a, b);
  const Tensor y = aten_act(x, act);
  return {y, bits_of(in_layout(x, y.strides()), act)};
}

Tensor act_mask_backward(const Tensor& grad, const Tensor& bits, int64_t kind, double a, double b,
                         at::IntArrayRef strides, const OptTensor& /*own*/) {
  return gradient_from_bits(in_layout(grad, strides), bits, act_of(kind, a, b));
}

}  // namespace

void register_act(torch::Library& m, c10::DispatchKey key) {
  m.impl("_act_mask", key, TORCH_FN(act_mask));
  m.impl("_act_mask_backward", key, TORCH_FN(act_mask_backward));
}

}  // namespace tsmem::composed
