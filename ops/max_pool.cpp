// Max pooling that keeps the position in the window, and neither the input nor 64-bit indices: 1, 2 or 4 bits an output
// where a window has at most 2, 4 or 16 positions (a byte on CUDA), one byte to 256, two to 65,536, else four.
//
// What is odd (a wrong argument, an empty window, a dtype or device without a kernel) goes to PyTorch's op, which
// handles or refuses it.
#include <ATen/autocast_mode.h>

#include "function.h"
#include "pool_layout.h"
#include "pool_windows.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const c10::OperatorHandle& max_pool_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_max_pool", "");
  return op;
}

std::tuple<Tensor, Tensor> call_forward(const Tensor& x, const Windows& w, bool positions) {
  static const auto op = max_pool_op()
                             .typed<std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                                                               IntArrayRef, IntArrayRef, bool)>();
  return op.call(x, w.kernel, w.stride, w.padding, w.dilation, w.out, positions);
}

Tensor call_backward(const Tensor& grad, const Tensor& position, IntArrayRef space, const Windows& w,
                     bool channels_last) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::_max_pool_backward", "")
                             .typed<Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                                           IntArrayRef, IntArrayRef, bool)>();
  return op.call(grad, position, space, w.kernel, w.stride, w.padding, w.dilation, channels_last);
}

struct MaxPool : Function<MaxPool> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Windows& w) {
    ctx->set_materialize_grads(false);
    auto [y, position] = call_forward(x, w, true);
    const int bits = position_bits(volume_of(make_axes(x.sizes().slice(2), w)), x);
    ctx->save_for_backward({pack(position, bits)});
    auto& data = ctx->saved_data;
    data["bits"] = bits;
    data["strides"] = position.strides();
    data["space"] = x.sizes().slice(2);
    data["kernel"] = w.kernel;
    data["stride"] = w.stride;
    data["padding"] = w.padding;
    data["dilation"] = w.dilation;
    data["channels_last"] = format_of(x, w.kernel.empty()) != at::MemoryFormat::Contiguous;
    return y;
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(2);
    auto& data = ctx->saved_data;
    auto ints = [&](const char* name) { return data[name].toIntVector(); };
    const Windows w{ints("kernel"), ints("stride"), ints("padding"), ints("dilation"), grad.sizes().slice(2).vec()};
    const Tensor position = unpack(ctx->get_saved_variables()[0], static_cast<int>(data["bits"].toInt()), grad.sizes(),
                                   ints("strides"), at::kByte);
    const auto space = ints("space");
    return {needs_grad(grad) ? gradient_at(indices_of(position, space, w), grad, space, w)
                             : call_backward(grad, position, space, w, data["channels_last"].toBool()),
            Tensor()};
  }
};

// An input that is batched or not, of `dims` axes of space, with a kernel for it, and not empty.
bool max_pool_is_ours(const Tensor& x, int64_t dims) {
  return (x.dim() == dims + 1 || x.dim() == dims + 2) && x.numel() > 0 && plain(x) && has_kernel(max_pool_op(), x);
}

Tensor pool(const Tensor& x, const Windows& w, int64_t dims, RecomputeArgument recompute) {
  const Tensor batched = x.dim() == dims + 2 ? x : x.unsqueeze(0);
  Tensor y = needs_grad(x) ? MaxPool::apply(batched, w) : std::get<0>(call_forward(batched, w, false));
  if (y.requires_grad())
    offer(
        y, {batched},
        [w](std::vector<Tensor>& from, const std::vector<bool>&) {
          return std::get<0>(call_forward(from[0], w, false));
        },
        recompute);
  return x.dim() == dims + 2 ? y : y.squeeze(0);
}

// Fills w.out, and tells whether these are arguments that PyTorch accepts and no window is empty.
bool valid(IntArrayRef space, Windows& w, bool ceil_mode) {
  for (size_t i = 0; i < space.size(); ++i) {
    const int64_t k = w.kernel[i], s = w.stride[i], p = w.padding[i], d = w.dilation[i];
    if (k <= 0 || s <= 0 || d <= 0 || p < 0 || p > ((k - 1) * d + 1) / 2) return false;
    const int64_t reach = space[i] + 2 * p - d * (k - 1) - 1;
    if (reach < 0) return false;
    int64_t out = (reach + (ceil_mode ? s - 1 : 0)) / s + 1;
    if (ceil_mode && (out - 1) * s >= space[i] + p) --out;
    w.out.push_back(out);
    if (make_axis(space[i], w, i).has_empty_window()) return false;
  }
  return true;
}

template <int64_t D>
Tensor aten_max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                     bool ceil_mode) {
  if constexpr (D == 1) return at::max_pool1d(x, kernel, stride, padding, dilation, ceil_mode);
  if constexpr (D == 2) return at::max_pool2d(x, kernel, stride, padding, dilation, ceil_mode);
  if constexpr (D == 3) return at::max_pool3d(x, kernel, stride, padding, dilation, ceil_mode);
}

template <int64_t D>
Tensor max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                bool ceil_mode, int64_t recompute) {
  auto fits = [](IntArrayRef list) { return list.size() == 1 || list.size() == D; };
  auto expand = [](IntArrayRef list) { return list.size() == 1 ? std::vector<int64_t>(D, list[0]) : list.vec(); };
  if (max_pool_is_ours(x, D) && fits(kernel) && (stride.empty() || fits(stride)) && fits(padding) && fits(dilation)) {
    Windows w{expand(kernel), expand(stride.empty() ? kernel : stride), expand(padding), expand(dilation), {}};
    if (valid(x.sizes().slice(x.dim() - D), w, ceil_mode)) return pool(x, w, D, recompute);
  }
  return aten_max_pool<D>(x, kernel, stride, padding, dilation, ceil_mode);
}

template <int64_t D>
Tensor adaptive_max_pool(const Tensor& x, IntArrayRef output_size, int64_t recompute) {
  bool positive = output_size.size() == D;
  for (int64_t o : output_size) positive = positive && o > 0;
  if (max_pool_is_ours(x, D) && positive) return pool(x, {{}, {}, {}, {}, output_size.vec()}, D, recompute);
  if constexpr (D == 1) return std::get<0>(at::adaptive_max_pool1d(x, output_size));
  if constexpr (D == 2) return std::get<0>(at::adaptive_max_pool2d(x, output_size));
  if constexpr (D == 3) return std::get<0>(at::adaptive_max_pool3d(x, output_size));
}

// AutocastCPU runs 3-d max pools, and the adaptive 3-d one, in float32.
Tensor max_pool3d_f32(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                      IntArrayRef dilation, bool ceil_mode, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCPU);
  return max_pool<3>(at::autocast::cached_cast(at::kFloat, x, c10::DeviceType::CPU), kernel, stride, padding, dilation,
                     ceil_mode, recompute);
}
Tensor adaptive_max_pool3d_f32(const Tensor& x, IntArrayRef output_size, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCPU);
  return adaptive_max_pool<3>(at::autocast::cached_cast(at::kFloat, x, c10::DeviceType::CPU), output_size, recompute);
}

}  // namespace

void register_max_pool(torch::Library& m) {
  m.def(
      "max_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=0, int[1] dilation=1, bool "
      "ceil_mode=False, int recompute=0) -> Tensor",
      TORCH_FN(max_pool<1>));
  m.def(
      "max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool "
      "ceil_mode=False, int recompute=0) -> Tensor",
      TORCH_FN(max_pool<2>));
  m.def(
      "max_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, bool "
      "ceil_mode=False, int recompute=0) -> Tensor",
      TORCH_FN(max_pool<3>));
  m.def("adaptive_max_pool1d(Tensor self, int[1] output_size, int recompute=0) -> Tensor",
        TORCH_FN(adaptive_max_pool<1>));
  m.def("adaptive_max_pool2d(Tensor self, int[2] output_size, int recompute=0) -> Tensor",
        TORCH_FN(adaptive_max_pool<2>));
  m.def("adaptive_max_pool3d(Tensor self, int[3] output_size, int recompute=0) -> Tensor",
        TORCH_FN(adaptive_max_pool<3>));
  m.def(
      "_max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, int[] out, bool positions) -> "
      "(Tensor, Tensor)");
  m.def(
      "_max_pool_backward(Tensor grad, Tensor position, int[] space, int[] kernel, int[] stride, int[] padding, int[] "
      "dilation, "
      "bool channels_last) -> Tensor");
  m.impl("max_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(max_pool3d_f32));
  m.impl("adaptive_max_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(adaptive_max_pool3d_f32));
}

}  // namespace tsmem
