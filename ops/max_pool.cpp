// Max pooling that keeps the position in the window: one byte an output where a window has at most 256 positions, two
// to 65,536, else four; and neither the input nor 64-bit indices.
//
// What is odd (a wrong argument, an empty window, a dtype or device without a kernel) goes to the stock op, which
// handles or refuses it.
#include "cpu/pool.h"
#include "cpu_dtype.h"
#include "pool_layout.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- Windows
// --------------------------------------------------------------------------------------------------------------------

// The windows of a pool, one entry an axis of space. Adaptive where `kernel` is empty: only `out` counts then.
struct Windows {
  std::vector<int64_t> kernel, stride, padding, dilation, out;
};

// One axis laid out for the kernels.
struct Axis {
  std::vector<int64_t> start, first, last;
  int64_t in = 1, window = 1, dilation = 1, stride = 0;

  PoolAxis view() const {
    return {in, static_cast<int64_t>(start.size()), window, dilation, stride, start.data(), first.data(), last.data()};
  }
  bool has_empty_window() const {
    for (size_t o = 0; o < start.size(); ++o)
      if (first[o] >= last[o]) return true;
    return false;
  }
};

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

std::vector<Axis> make_axes(IntArrayRef space, const Windows& w) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < space.size(); ++i) axes.push_back(make_axis(space[i], w, i));
  return axes;
}

at::ScalarType position_type(const std::vector<Axis>& axes) {
  int64_t volume = 1;
  for (const Axis& a : axes) volume *= a.window;
  return tsmem::position_type(volume);
}

PoolArgs kernel_args(const std::vector<Axis>& axes, IntArrayRef sizes, at::ScalarType dtype, int64_t position_bytes,
                     bool channels_last) {
  static const Axis flat = [] {
    Axis a;
    a.start = {0}, a.first = {0}, a.last = {1}, a.stride = 1;
    return a;
  }();
  PoolArgs args{cpu_dtype(dtype), static_cast<int32_t>(position_bytes), channels_last, sizes[0], sizes[1], {}, {}, {}};
  const size_t n = axes.size();
  args.d = (n == 3 ? axes[0] : flat).view();
  args.h = (n >= 2 ? axes[n - 2] : flat).view();
  args.w = axes[n - 1].view();
  return args;
}

// --- Internal ops: [batch, channels, space...]
// ------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> max_pool_cpu(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef dilation, IntArrayRef out, bool positions) {
  const auto format = format_of(x, kernel.empty());
  const auto axes =
      make_axes(x.sizes().slice(2), {kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), out.vec()});
  const Tensor dense = contiguous_in(x, format);
  const auto sizes = with_space(x, out);
  Tensor y = empty_in(sizes, format, x.options());
  Tensor position = positions ? empty_in(sizes, format, x.options().dtype(position_type(axes)))
                              : at::empty({0}, x.options().dtype(at::kByte));
  const bool channels_last = format != at::MemoryFormat::Contiguous;
  const PoolArgs args = kernel_args(axes, x.sizes(), x.scalar_type(), position.element_size(), channels_last);
  const void* from = dense.const_data_ptr();
  void* to = y.mutable_data_ptr();
  void* where = positions ? position.mutable_data_ptr() : nullptr;
  const int64_t rows = x.size(0) * (channels_last ? 1 : x.size(1)) * args.d.out * args.h.out;
  if (y.numel() == 0) return {y, position};
  const int64_t grain =
      std::max<int64_t>(1, 16384 / (y.numel() / rows * args.d.window * args.h.window * args.w.window));
  at::parallel_for(0, rows, grain,
                   [&](int64_t begin, int64_t end) { pool_kernels().forward(args, from, to, where, begin, end); });
  return {y, position};
}

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

Tensor max_pool_backward_cpu(const Tensor& grad, const Tensor& position, IntArrayRef space, IntArrayRef kernel,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const auto axes =
      make_axes(space, {kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), grad.sizes().slice(2).vec()});
  const auto format = format_for(channels_last, grad.dim());
  // A hook on saved tensors may have given the positions another layout.
  const Tensor dense = contiguous_in(grad, format), positions = contiguous_in(position, format);
  Tensor out = empty_in(with_space(grad, space), format, grad.options());
  if (out.numel() == 0) return out;
  const PoolArgs args = kernel_args(axes, grad.sizes(), grad.scalar_type(), position.element_size(), channels_last);
  // Channels last, few images are cut into blocks of at least 16 channels, so that every thread has work.
  const int64_t threads = at::get_num_threads(), batch = grad.size(0), channels = grad.size(1);
  const int64_t blocks = channels_last && batch % threads != 0
                             ? std::max<int64_t>(1, std::min((threads + batch - 1) / batch, channels / 16))
                             : 1;
  const int64_t units = channels_last ? batch * blocks : batch * channels;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, out.numel() / units));
  const void* from = dense.const_data_ptr();
  const void* where = positions.const_data_ptr();
  void* to = out.mutable_data_ptr();
  at::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    pool_kernels().backward(args, blocks, from, where, to, begin, end);
  });
  return out;
}

Tensor max_pool_backward_meta(const Tensor& grad, const Tensor&, IntArrayRef space, IntArrayRef, IntArrayRef,
                              IntArrayRef, IntArrayRef, bool channels_last) {
  return empty_in(with_space(grad, space), format_for(channels_last, grad.dim()), grad.options());
}

const c10::OperatorHandle& forward_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_max_pool", "");
  return op;
}

std::tuple<Tensor, Tensor> call_forward(const Tensor& x, const Windows& w, bool positions) {
  static const auto op = forward_op()
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

// --- Autograd
// -------------------------------------------------------------------------------------------------------------------

// The same backward out of differentiable ATen calls, for create_graph: positions become indices into the flattened
// input.
Tensor differentiable_backward(const Tensor& grad, const Tensor& position, IntArrayRef space, const Windows& w) {
  Tensor rest = position.to(at::kLong), index = at::zeros_like(rest);
  const auto axes = make_axes(space, w);
  int64_t step = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    std::vector<int64_t> shape(axes.size(), 1);
    shape[i] = static_cast<int64_t>(axes[i].start.size());
    // On the device: a copy from here would wait for it.
    const Tensor place = at::arange(shape[i], rest.options()).view(shape);
    const Tensor start =
        w.kernel.empty() ? (place * space[i]).floor_divide(shape[i]) : place * axes[i].stride - w.padding[i];
    const Tensor k = rest.remainder(axes[i].window);
    index = index + (start + k * axes[i].dilation) * step;
    rest = rest.floor_divide(axes[i].window);
    step *= space[i];
  }
  return at::zeros({grad.size(0), grad.size(1), step}, grad.options())
      .scatter_add(2, index.flatten(2), grad.flatten(2))
      .view(with_space(grad, space));
}

struct MaxPool : torch::autograd::Function<MaxPool> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Windows& w) {
    ctx->set_materialize_grads(false);
    auto [y, position] = call_forward(x, w, true);
    ctx->save_for_backward({position});
    auto& data = ctx->saved_data;
    data["space"] = x.sizes().slice(2);
    data["kernel"] = w.kernel;
    data["stride"] = w.stride;
    data["padding"] = w.padding;
    data["dilation"] = w.dilation;
    data["channels_last"] = format_of(x, w.kernel.empty()) != at::MemoryFormat::Contiguous;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(2);
    auto& data = ctx->saved_data;
    auto ints = [&](const char* name) { return data[name].toIntVector(); };
    const Windows w{ints("kernel"), ints("stride"), ints("padding"), ints("dilation"), grad.sizes().slice(2).vec()};
    const Tensor position = ctx->get_saved_variables()[0];
    const auto space = ints("space");
    return {needs_grad(grad) ? differentiable_backward(grad, position, space, w)
                             : call_backward(grad, position, space, w, data["channels_last"].toBool()),
            Tensor()};
  }
};

// An input that is batched or not, of `dims` axes of space, with a kernel for it, and not empty.
bool ours(const Tensor& x, int64_t dims) {
  return (x.dim() == dims + 1 || x.dim() == dims + 2) && x.numel() > 0 && plain(x) && has_kernel(forward_op(), x);
}

Tensor pool(const Tensor& x, const Windows& w, int64_t dims, int64_t recompute) {
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

// Fills w.out, and tells whether these are arguments that stock accepts and no window is empty.
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
Tensor stock(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
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
  if (ours(x, D) && fits(kernel) && (stride.empty() || fits(stride)) && fits(padding) && fits(dilation)) {
    Windows w{expand(kernel), expand(stride.empty() ? kernel : stride), expand(padding), expand(dilation), {}};
    if (valid(x.sizes().slice(x.dim() - D), w, ceil_mode)) return pool(x, w, D, recompute);
  }
  return stock<D>(x, kernel, stride, padding, dilation, ceil_mode);
}

template <int64_t D>
Tensor adaptive_max_pool(const Tensor& x, IntArrayRef output_size, int64_t recompute) {
  bool positive = output_size.size() == D;
  for (int64_t o : output_size) positive = positive && o > 0;
  if (ours(x, D) && positive) return pool(x, {{}, {}, {}, {}, output_size.vec()}, D, recompute);
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
  m.impl("_max_pool", c10::DispatchKey::CPU, TORCH_FN(max_pool_cpu));
  m.impl("_max_pool_backward", c10::DispatchKey::CPU, TORCH_FN(max_pool_backward_cpu));
  m.impl("_max_pool", c10::DispatchKey::Meta, TORCH_FN(max_pool_meta));
  m.impl("_max_pool_backward", c10::DispatchKey::Meta, TORCH_FN(max_pool_backward_meta));
  m.impl("max_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(max_pool3d_f32));
  m.impl("adaptive_max_pool3d", c10::DispatchKey::AutocastCPU, TORCH_FN(adaptive_max_pool3d_f32));
}

}  // namespace tsmem
