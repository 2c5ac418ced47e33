// tsmem::_max_pool and _max_pool_backward on a CUDA device: [batch, channels, space...].
#include "cuda/device.h"
#include "cuda/pool.h"
#include "cuda/raw_ops.h"
#include "pool_layout.h"

namespace tsmem::cuda {
namespace {

using at::IntArrayRef;
using at::Tensor;

// Adaptive where there is no kernel.
PoolAxis axis_of(int64_t in, int64_t out, size_t i, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                 IntArrayRef dilation) {
  PoolAxis a;
  a.in = in;
  a.out = out;
  a.adaptive = kernel.empty();
  if (!a.adaptive) {
    a.window = kernel[i], a.stride = stride[i], a.padding = padding[i], a.dilation = dilation[i];
    return a;
  }
  for (int64_t o = 0; o < out; ++o) a.window = std::max(a.window, ((o + 1) * in + out - 1) / out - o * in / out);
  return a;
}

PoolArgs args_of(const Tensor& like, bool channels_last, IntArrayRef in, IntArrayRef out, IntArrayRef kernel,
                 IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  PoolArgs a;
  a.norm.dtype = cpu_dtype(like.scalar_type());
  a.norm.channels = like.size(1);
  a.batch = like.size(0);
  a.channels_last = channels_last;
  PoolAxis* const axes[3] = {&a.d, &a.h, &a.w};
  const size_t n = in.size();
  for (size_t i = 0; i < n; ++i) *axes[3 - n + i] = axis_of(in[i], out[i], i, kernel, stride, padding, dilation);
  return a;
}
int64_t volume(const PoolArgs& a) { return a.d.window * a.h.window * a.w.window; }

std::tuple<Tensor, Tensor> max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                    IntArrayRef dilation, IntArrayRef out, bool positions) {
  const OnDevice on(x);
  const auto format = format_of(x, kernel.empty());
  PoolArgs a =
      args_of(x, format != at::MemoryFormat::Contiguous, x.sizes().slice(2), out, kernel, stride, padding, dilation);
  const Tensor dense = contiguous_in(x, format);
  const auto sizes = with_space(x, out);
  Tensor y = empty_in(sizes, format, x.options());
  Tensor position = positions ? empty_in(sizes, format, x.options().dtype(position_type(volume(a))))
                              : at::empty({0}, x.options().dtype(at::kByte));
  if (y.numel() == 0) return {y, position};
  a.position_bytes = static_cast<int32_t>(position.element_size());
  a.norm.aligned = aligned({dense, y});
  a.x = read(dense);
  a.out = write(y);
  if (positions) a.positions = write(position);
  prepare(a, /*of_outputs=*/true);
  pool_forward(a, on.stream);
  return {y, position};
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& position, IntArrayRef space, IntArrayRef kernel,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const OnDevice on(grad);
  const auto format = format_for(channels_last, grad.dim());
  // A hook on saved tensors may have given the positions another layout.
  const Tensor dense = contiguous_in(grad, format), positions = contiguous_in(position, format);
  Tensor out = empty_in(with_space(grad, space), format, grad.options());
  if (out.numel() == 0) return out;
  if (grad.numel() == 0) return out.zero_();
  PoolArgs a = args_of(grad, channels_last, space, grad.sizes().slice(2), kernel, stride, padding, dilation);
  a.position_bytes = static_cast<int32_t>(position.element_size());
  a.norm.aligned = aligned({dense, out});
  a.grad = read(dense);
  a.positions = const_cast<void*>(read(positions));
  a.out = write(out);
  prepare(a, /*of_outputs=*/false);
  pool_backward(a, on.stream);
  return out;
}

}  // namespace

void implement_pool(torch::Library& m) {
  m.impl("_max_pool", TORCH_FN(max_pool));
  m.impl("_max_pool_backward", TORCH_FN(max_pool_backward));
}

}  // namespace tsmem::cuda
