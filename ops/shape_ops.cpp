// Pools and paddings whose backward needs the input's shape alone: sizes are kept, and no tensor.
//
// Forward and backward are PyTorch's ops; their backward functions take `self` and look at its sizes and layout only,
// so they get shape_of() in its place. A padding can be recomputed in backward: a convolution behind it keeps what it
// is made from. aten's upsample_*, mean, constant and circular pad keep sizes only themselves, and have no op here.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common.h"
#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An op and its arguments other than the input. Lists that it does not take stay empty.
struct ShapeCall {
  enum Op : int64_t {
    avg_pool2d,
    avg_pool3d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    reflection_pad1d,
    reflection_pad2d,
    reflection_pad3d,
    replication_pad1d,
    replication_pad2d,
    replication_pad3d,
  };
  Op op;
  std::vector<int64_t> size;  // kernel_size, output_size or the padding of a pad
  std::vector<int64_t> stride = {}, padding = {};
  bool ceil_mode = false, count_include_pad = true;
  std::optional<int64_t> divisor_override = std::nullopt;
};

Tensor aten_shape_op(const Tensor& x, const ShapeCall& c) {
  switch (c.op) {
    case ShapeCall::avg_pool2d:
      return at::avg_pool2d(x, c.size, c.stride, c.padding, c.ceil_mode, c.count_include_pad, c.divisor_override);
    case ShapeCall::avg_pool3d:
      return at::avg_pool3d(x, c.size, c.stride, c.padding, c.ceil_mode, c.count_include_pad, c.divisor_override);
    case ShapeCall::adaptive_avg_pool2d:
      return at::adaptive_avg_pool2d(x, c.size);
    case ShapeCall::adaptive_avg_pool3d:
      return at::adaptive_avg_pool3d(x, c.size);
    case ShapeCall::reflection_pad1d:
      return at::reflection_pad1d(x, c.size);
    case ShapeCall::reflection_pad2d:
      return at::reflection_pad2d(x, c.size);
    case ShapeCall::reflection_pad3d:
      return at::reflection_pad3d(x, c.size);
    case ShapeCall::replication_pad1d:
      return at::replication_pad1d(x, c.size);
    case ShapeCall::replication_pad2d:
      return at::replication_pad2d(x, c.size);
    case ShapeCall::replication_pad3d:
      return at::replication_pad3d(x, c.size);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Tensor aten_backward(const Tensor& grad, const Tensor& x, const ShapeCall& c) {
  switch (c.op) {
    case ShapeCall::avg_pool2d:
      return at::avg_pool2d_backward(grad, x, c.size, c.stride, c.padding, c.ceil_mode, c.count_include_pad,
                                     c.divisor_override);
    case ShapeCall::avg_pool3d:
      return at::avg_pool3d_backward(grad, x, c.size, c.stride, c.padding, c.ceil_mode, c.count_include_pad,
                                     c.divisor_override);
    case ShapeCall::adaptive_avg_pool2d:
      return at::_adaptive_avg_pool2d_backward(grad, x);
    case ShapeCall::adaptive_avg_pool3d:
      return at::_adaptive_avg_pool3d_backward(grad, x);
    case ShapeCall::reflection_pad1d:
      return at::reflection_pad1d_backward(grad, x, c.size);
    case ShapeCall::reflection_pad2d:
      return at::reflection_pad2d_backward(grad, x, c.size);
    case ShapeCall::reflection_pad3d:
      return at::reflection_pad3d_backward(grad, x, c.size);
    case ShapeCall::replication_pad1d:
      return at::replication_pad1d_backward(grad, x, c.size);
    case ShapeCall::replication_pad2d:
      return at::replication_pad2d_backward(grad, x, c.size);
    case ShapeCall::replication_pad3d:
      return at::replication_pad3d_backward(grad, x, c.size);
  }
  TORCH_INTERNAL_ASSERT(false);
}

struct ShapeOnly : Function<ShapeOnly> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const ShapeCall& c) {
    ctx->set_materialize_grads(false);
    auto& data = ctx->saved_data;
    data["sizes"] = x.sizes();
    data["strides"] = x.strides();
    data["op"] = static_cast<int64_t>(c.op);
    data["size"] = c.size;
    data["stride"] = c.stride;
    data["padding"] = c.padding;
    data["ceil_mode"] = c.ceil_mode;
    data["count_include_pad"] = c.count_include_pad;
    data["divisor"] = c.divisor_override;
    return aten_shape_op(x, c);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(2);
    auto& data = ctx->saved_data;
    auto ints = [&](const char* name) { return data[name].toIntVector(); };
    const ShapeCall c{static_cast<ShapeCall::Op>(data["op"].toInt()),
                      ints("size"),
                      ints("stride"),
                      ints("padding"),
                      data["ceil_mode"].toBool(),
                      data["count_include_pad"].toBool(),
                      data["divisor"].toOptional<int64_t>()};
    return {aten_backward(grad, shape_of(ints("sizes"), ints("strides"), grad.options()), c), Tensor()};
  }
};

Tensor run_shape_op(const Tensor& x, const ShapeCall& c) {
  return needs_grad(x) && plain(x) ? ShapeOnly::apply(x, c) : aten_shape_op(x, c);
}

// --- Public ops
// -------------------------------------------------------------------------------------------------------------------

Tensor avg_pool2d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, bool ceil_mode,
                  bool count_include_pad, std::optional<int64_t> divisor) {
  return run_shape_op(
      x, {ShapeCall::avg_pool2d, kernel.vec(), stride.vec(), padding.vec(), ceil_mode, count_include_pad, divisor});
}
Tensor avg_pool3d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, bool ceil_mode,
                  bool count_include_pad, std::optional<int64_t> divisor) {
  return run_shape_op(
      x, {ShapeCall::avg_pool3d, kernel.vec(), stride.vec(), padding.vec(), ceil_mode, count_include_pad, divisor});
}
// A 2-d pool of height 1, as in PyTorch.
Tensor avg_pool1d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, bool ceil_mode,
                  bool count_include_pad) {
  if (!needs_grad(x) || (x.dim() != 2 && x.dim() != 3) || kernel.size() != 1 || stride.size() > 1 ||
      padding.size() != 1)
    return at::avg_pool1d(x, kernel, stride, padding, ceil_mode, count_include_pad);
  const int64_t step = stride.empty() ? kernel[0] : stride[0];
  return tsmem::avg_pool2d(x.unsqueeze(-2), {1, kernel[0]}, {1, step}, {0, padding[0]}, ceil_mode, count_include_pad,
                           std::nullopt)
      .squeeze(-2);
}

// To one pixel, PyTorch's is a mean, which keeps sizes only and is differentiable by itself.
bool to_one(IntArrayRef size) {
  return std::all_of(size.begin(), size.end(), [](int64_t s) { return s == 1; });
}
Tensor adaptive_avg_pool2d(const Tensor& x, IntArrayRef size) {
  return to_one(size) ? at::adaptive_avg_pool2d(x, size)
                      : run_shape_op(x, {ShapeCall::adaptive_avg_pool2d, size.vec()});
}
Tensor adaptive_avg_pool3d(const Tensor& x, IntArrayRef size) {
  return to_one(size) ? at::adaptive_avg_pool3d(x, size)
                      : run_shape_op(x, {ShapeCall::adaptive_avg_pool3d, size.vec()});
}
Tensor adaptive_avg_pool1d(const Tensor& x, IntArrayRef size) {
  if (!needs_grad(x) || (x.dim() != 2 && x.dim() != 3) || size.size() != 1) return at::adaptive_avg_pool1d(x, size);
  return tsmem::adaptive_avg_pool2d(x.unsqueeze(-2), {1, size[0]}).squeeze(-2);
}

template <ShapeCall::Op op>
Tensor pad_op(const Tensor& x, IntArrayRef padding, int64_t recompute) {
  const ShapeCall c{op, padding.vec()};
  const Tensor out = run_shape_op(x, c);
  if (needs_grad(x) && plain(x))
    offer(
        out, {x}, [c](std::vector<Tensor>& from, const std::vector<bool>&) { return aten_shape_op(from[0], c); },
        recompute);
  return out;
}

// Reflect and replicate become their own ops, called by the dispatcher, as autocast has an opinion on them.
Tensor pad(const Tensor& x, IntArrayRef padding, c10::string_view mode, std::optional<double> value,
           int64_t recompute) {
  const int64_t dims = static_cast<int64_t>(padding.size()) / 2;
  const bool reflect = mode == "reflect";
  const bool fits = padding.size() % 2 == 0 && dims >= 1 && dims <= 3 && (x.dim() == dims + 1 || x.dim() == dims + 2);
  if (!needs_grad(x) || !fits || value || (!reflect && mode != "replicate")) return at::pad(x, padding, mode, value);
  using Signature = Tensor(const Tensor&, IntArrayRef, int64_t);
  auto find = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  };
  static const c10::TypedOperatorHandle<Signature> ops[2][3] = {
      {find("tsmem::replication_pad1d"), find("tsmem::replication_pad2d"), find("tsmem::replication_pad3d")},
      {find("tsmem::reflection_pad1d"), find("tsmem::reflection_pad2d"), find("tsmem::reflection_pad3d")}};
  return ops[reflect][dims - 1].call(x, padding, recompute);
}

// `op` in float32, as AutocastCPU runs its aten namesake.
template <auto op>
struct F32;
template <class... Rest, Tensor (*op)(const Tensor&, Rest...)>
struct F32<op> {
  static Tensor call(const Tensor& x, Rest... rest) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCPU);
    return op(at::autocast::cached_cast(at::kFloat, x, c10::DeviceType::CPU), rest...);
  }
};

}  // namespace

void register_shape_ops(torch::Library& m) {
  m.def(
      "avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=0, bool ceil_mode=False, bool "
      "count_include_pad=True) -> Tensor",
      TORCH_FN(avg_pool1d));
  m.def(
      "avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool "
      "count_include_pad=True, int? divisor_override=None) -> Tensor",
      TORCH_FN(avg_pool2d));
  m.def(
      "avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, bool "
      "count_include_pad=True, int? divisor_override=None) -> Tensor",
      TORCH_FN(avg_pool3d));
  m.def("adaptive_avg_pool1d(Tensor self, int[1] output_size) -> Tensor", TORCH_FN(adaptive_avg_pool1d));
  m.def("adaptive_avg_pool2d(Tensor self, int[2] output_size) -> Tensor", TORCH_FN(adaptive_avg_pool2d));
  m.def("adaptive_avg_pool3d(Tensor self, int[3] output_size) -> Tensor", TORCH_FN(adaptive_avg_pool3d));
  m.def("reflection_pad1d(Tensor self, int[2] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::reflection_pad1d>));
  m.def("reflection_pad2d(Tensor self, int[4] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::reflection_pad2d>));
  m.def("reflection_pad3d(Tensor self, int[6] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::reflection_pad3d>));
  m.def("replication_pad1d(Tensor self, int[2] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::replication_pad1d>));
  m.def("replication_pad2d(Tensor self, int[4] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::replication_pad2d>));
  m.def("replication_pad3d(Tensor self, int[6] padding, int recompute=0) -> Tensor",
        TORCH_FN(pad_op<ShapeCall::replication_pad3d>));
  m.def("pad(Tensor self, int[] pad, str mode=\"constant\", float? value=None, int recompute=0) -> Tensor",
        TORCH_FN(pad));
  m.impl("avg_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(F32<&avg_pool3d>::call));
  m.impl("adaptive_avg_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(F32<&adaptive_avg_pool3d>::call));
  m.impl("reflection_pad1d", c10::DispatchKey::AutocastCPU, TORCH_FN(F32<&pad_op<ShapeCall::reflection_pad1d>>::call));
  m.impl("reflection_pad2d", c10::DispatchKey::AutocastCPU, TORCH_FN(F32<&pad_op<ShapeCall::reflection_pad2d>>::call));
  m.impl("replication_pad1d", c10::DispatchKey::AutocastCPU,
         TORCH_FN(F32<&pad_op<ShapeCall::replication_pad1d>>::call));
  m.impl("replication_pad2d", c10::DispatchKey::AutocastCPU,
         TORCH_FN(F32<&pad_op<ShapeCall::replication_pad2d>>::call));
  m.impl("replication_pad3d", c10::DispatchKey::AutocastCPU,
         TORCH_FN(F32<&pad_op<ShapeCall::replication_pad3d>>::call));
}

}  // namespace tsmem
