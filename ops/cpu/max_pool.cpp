// The raw max pooling ops on the CPU: [batch, channels, space...].
#include <ATen/Parallel.h>

#include "cpu/pool.h"
#include "cpu_dtype.h"
#include "pool_layout.h"
#include "pool_windows.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;

PoolAxis view(const Axis& a) {
  return {a.in,           static_cast<int64_t>(a.start.size()),
          a.window,       a.dilation,
          a.stride,       a.start.data(),
          a.first.data(), a.last.data()};
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
  args.d = view(n == 3 ? axes[0] : flat);
  args.h = view(n >= 2 ? axes[n - 2] : flat);
  args.w = view(axes[n - 1]);
  return args;
}

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

}  // namespace

void register_max_pool_cpu(torch::Library& m) {
  m.impl("_max_pool", c10::DispatchKey::CPU, TORCH_FN(max_pool_cpu));
  m.impl("_max_pool_backward", c10::DispatchKey::CPU, TORCH_FN(max_pool_backward_cpu));
}

}  // namespace tsmem
