// tsmem::_act_mask and _act_mask_backward on a CUDA device.
#include "common.h"
#include "cuda/device.h"
#include "cuda/mask.h"
#include "cuda/raw_ops.h"
#include "layout.h"

namespace tsmem::cuda {

void fail(const char* what, const char* why) { TORCH_CHECK(false, "tsmem: the kernel ", what, " was refused: ", why); }

namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> act_mask(const Tensor& x, int64_t kind, double a, double b) {
  const OnDevice on(x);
  Tensor y = at::empty_like(x), mask = at::empty({(x.numel() + 7) / 8}, x.options().dtype(at::kByte));
  const Tensor dense = in_layout(x, y.strides());
  mask_pack(cpu_dtype(x.scalar_type()), act_for(x.scalar_type(), act_of(kind, a, b)), read(dense), write(y),
            mask.mutable_data_ptr<uint8_t>(), x.numel(), aligned({dense, y}), on.stream);
  return {y, mask};
}

Tensor act_mask_backward(const Tensor& grad, const Tensor& mask, int64_t kind, double a, double b,
                         at::IntArrayRef strides, const OptTensor& own) {
  const OnDevice on(grad);
  const Tensor dense = in_layout(grad, strides);
  Tensor out = own && dense.is_same(grad) ? *own : at::empty_strided(grad.sizes(), strides, grad.options());
  mask_apply(cpu_dtype(grad.scalar_type()), act_of(kind, a, b), read(dense), mask.const_data_ptr<uint8_t>(), write(out),
             grad.numel(), aligned({dense, out}), on.stream);
  return out;
}

}  // namespace

void implement_mask(torch::Library& m) {
  m.impl("_act_mask", TORCH_FN(act_mask));
  m.impl("_act_mask_backward", TORCH_FN(act_mask_backward));
}

}  // namespace tsmem::cuda
