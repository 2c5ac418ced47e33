// The raw activation ops on the CPU.
#include <ATen/Parallel.h>

#include "activation.h"
#include "common.h"
#include "cpu/mask.h"
#include "cpu/smooth_act.h"
#include "cpu_dtype.h"
#include "layout.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> act_mask_cpu(const Tensor& x, int64_t kind, double a, double b) {
  const Act act = act_of(kind, a, b);
  const bool fused = mask_writes_output(act.kind);
  Tensor y = fused ? at::empty_like(x) : aten_act(x, act);
  const Tensor dense = in_layout(x, y.strides());
  Tensor mask = at::empty({(x.numel() + 7) / 8}, x.options().dtype(at::kByte));
  const auto* from = static_cast<const char*>(dense.const_data_ptr());
  auto* to = fused ? static_cast<char*>(y.mutable_data_ptr()) : nullptr;
  auto* bits = mask.mutable_data_ptr<uint8_t>();
  const Dtype dtype = cpu_dtype(x.scalar_type());
  const int64_t n = x.numel(), size = x.element_size();
  // By whole bytes of the mask.
  at::parallel_for(0, mask.numel(), 4096, [&](int64_t begin, int64_t end) {
    const int64_t first = 8 * begin, count = std::min(n, 8 * end) - first;
    mask_kernels().pack(dtype, act, from + first * size, to ? to + first * size : nullptr, bits + begin, count);
  });
  return {y, mask};
}

// own: memory that may take the result, which is grad's.
Tensor act_mask_backward_cpu(const Tensor& grad, const Tensor& mask, int64_t kind, double a, double b,
                             at::IntArrayRef strides, const OptTensor& own) {
  const Tensor dense = in_layout(grad, strides);
  Tensor out = own && dense.is_same(grad) ? *own : at::empty_strided(grad.sizes(), strides, grad.options());
  const Act act = act_of(kind, a, b);
  const auto* from = static_cast<const char*>(dense.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto* bits = mask.const_data_ptr<uint8_t>();
  const Dtype dtype = cpu_dtype(grad.scalar_type());
  const int64_t n = grad.numel(), size = grad.element_size();
  at::parallel_for(0, mask.numel(), 4096, [&](int64_t begin, int64_t end) {
    const int64_t first = 8 * begin, count = std::min(n, 8 * end) - first;
    mask_kernels().apply(dtype, act, from + first * size, bits + begin, to + first * size, count);
  });
  return out;
}

constexpr int64_t kSerialElements = 1 << 14;  // elements that are not worth a second thread

// x and grad: dense, with the same strides, which the results have too.
Tensor smooth_act_cpu(const Tensor& x, const Act& act) {
  Tensor y = at::empty_like(x);
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(y.mutable_data_ptr());
  const Dtype dtype = cpu_dtype(x.scalar_type());
  const int64_t size = x.element_size();
  at::parallel_for(0, x.numel(), kSerialElements, [&](int64_t begin, int64_t end) {
    smooth_act_kernels().forward(dtype, act, from + begin * size, to + begin * size, end - begin);
  });
  return y;
}

// out: where the result goes, which may be grad.
Tensor smooth_act_backward_cpu(const Tensor& grad, const Tensor& x, const Act& act, const OptTensor& out) {
  Tensor result = out ? *out : at::empty_like(grad);
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  const auto* g = static_cast<const char*>(grad.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  const Dtype dtype = cpu_dtype(x.scalar_type());
  const int64_t size = x.element_size();
  at::parallel_for(0, x.numel(), kSerialElements, [&](int64_t begin, int64_t end) {
    smooth_act_kernels().backward(dtype, act, from + begin * size, g + begin * size, to + begin * size, end - begin);
  });
  return result;
}

}  // namespace

void register_act_cpu(torch::Library& m) {
  m.impl("_act_mask", c10::DispatchKey::CPU, TORCH_FN(act_mask_cpu));
  m.impl("_act_mask_backward", c10::DispatchKey::CPU, TORCH_FN(act_mask_backward_cpu));
  m.impl("_smooth_act", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&smooth_act_cpu>::call)));
  m.impl("_smooth_act_backward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&smooth_act_backward_cpu>::call)));
}

}  // namespace tsmem
