// The raw ops of max_pool2d(act(batch_norm(input))) on the CPU.
#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

NormPoolArgs pool_args(const Map& m, const Tensor& x, at::IntArrayRef out_size, at::IntArrayRef kernel,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                       const Tensor& positions, bool channels_last) {
  NormPoolArgs p;
  p.norm = m.args;
  p.rows = channels_last;
  p.images = x.size(0), p.height = x.size(2), p.width = x.size(3);
  p.out_height = out_size[0], p.out_width = out_size[1];
  for (int d = 0; d < 2; ++d)
    p.kernel[d] = kernel[d], p.stride[d] = stride[d], p.padding[d] = padding[d], p.dilation[d] = dilation[d];
  p.positions = positions.defined() && positions.numel() > 0 ? positions.data_ptr() : nullptr;
  p.position_bytes = static_cast<int>(c10::elementSize(position_type(kernel)));
  return p;
}

// f(begin, end) over planes, or images with channels_last.
template <class F>
void parallel_planes(const NormPoolArgs& p, int64_t numel, F f) {
  const int64_t planes = p.rows ? p.images : p.images * p.norm.channels;
  at::parallel_for(0, planes, std::max<int64_t>(1, kSerial * planes / std::max<int64_t>(numel, 1)), f);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pool_forward_cpu(const Tensor& input, const OptTensor& weight,
                                                            const OptTensor& bias, const OptTensor& running_mean,
                                                            const OptTensor& running_var, bool training,
                                                            double momentum, double eps, const Act& act,
                                                            at::IntArrayRef kernel, at::IntArrayRef stride,
                                                            at::IntArrayRef padding, at::IntArrayRef dilation,
                                                            at::IntArrayRef out_size, bool keep_positions) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format);
  Map m(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor mean = at::empty({m.args.channels}, options), invstd = at::empty({m.args.channels}, options);
  m.args.x = x.const_data_ptr();
  const std::vector<int64_t> sizes{x.size(0), x.size(1), out_size[0], out_size[1]};
  Tensor out = at::empty(sizes, x.options(), format);
  Tensor positions = keep_positions ? at::empty(sizes, x.options().dtype(position_type(kernel)), format)
                                    : at::empty({0}, x.options().dtype(position_type(kernel)));
  forward(m, {weight, bias, running_mean, running_var, training, momentum, eps}, mean, invstd);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.out = out.mutable_data_ptr();
    const NormPoolArgs p = pool_args(m, x, out_size, kernel, stride, padding, dilation, positions, channels_last);
    parallel_planes(p, m.numel, [&](int64_t begin, int64_t end) { norm_pool_kernels().forward(p, begin, end); });
  });
  return {out, mean, invstd, positions};
}

// The pooled output again, from statistics and positions that are known.
Tensor pool_apply_cpu(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                      const Tensor& invstd, const Tensor& positions, const Act& act, at::IntArrayRef kernel,
                      at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                      at::IntArrayRef out_size) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format), taken = positions.contiguous(format);
  Map m(x, channels_last, act);
  m.args.x = x.const_data_ptr();
  Tensor out = at::empty({x.size(0), x.size(1), out_size[0], out_size[1]}, x.options(), format);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.out = out.mutable_data_ptr();
    const NormPoolArgs p = pool_args(m, x, out_size, kernel, stride, padding, dilation, taken, channels_last);
    parallel_planes(p, out.numel(), [&](int64_t begin, int64_t end) { norm_pool_kernels().again(p, begin, end); });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> pool_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                     const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                     const Tensor& invstd, const Tensor& positions, bool training,
                                                     bool channels_last, const Act& act, at::IntArrayRef kernel,
                                                     at::IntArrayRef stride, at::IntArrayRef padding,
                                                     at::IntArrayRef dilation, std::array<bool, 3> want) {
  const auto format = feature_format(4, channels_last);
  const Tensor g = grad_output.contiguous(format), x = input.contiguous(format), taken = positions.contiguous(format);
  Map m(x, channels_last, act);
  m.args.x = x.const_data_ptr();
  m.args.grad = g.const_data_ptr();
  Tensor grads[3];
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  if (want[0]) grads[0] = at::empty_like(x, x.options(), format), m.args.out = grads[0].mutable_data_ptr();
  for (int i : {1, 2})
    if (want[i]) grads[i] = at::empty({m.args.channels}, options);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Vector<A> s(invstd, 1);
    Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.slope = m.args.scale;
    Table<A> tilt(m), level(m);
    NormPoolArgs p = pool_args(m, x, g.sizes().slice(2), kernel, stride, padding, dilation, taken, channels_last);
    const int64_t channels = m.args.channels;
    if (training || want[1] || want[2]) {
      // Sums of one image each, added in order: the same for any number of threads.
      std::vector<double> sum(p.images * channels), dot(p.images * channels);
      parallel_planes(p, g.numel(), [&](int64_t begin, int64_t end) {
        const int64_t per_image = p.rows ? 1 : channels;
        for (int64_t i = begin; i < end; ++i)
          norm_pool_kernels().reduce(p, i, i + 1, &sum[i / per_image * channels], &dot[i / per_image * channels]);
      });
      const double count = static_cast<double>(m.args.outer * m.args.inner);
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t n = 1; n < p.images; ++n) sum[c] += sum[n * channels + c], dot[c] += dot[n * channels + c];
        dot[c] *= static_cast<double>(s[c]);
        if (want[1]) grads[1].mutable_data_ptr<A>()[c] = static_cast<A>(dot[c]);
        if (want[2]) grads[2].mutable_data_ptr<A>()[c] = static_cast<A>(sum[c]);
        const double scale = static_cast<double>(coefficients.scale[c]);
        tilt[c] = static_cast<A>(scale * static_cast<double>(s[c]) * dot[c] / count);
        level[c] = static_cast<A>(scale * sum[c] / count);
      }
      tilt.repeat(m), level.repeat(m);
    }
    if (!want[0]) return;
    if (training) p.norm.tilt = tilt.values.data(), p.norm.level = level.values.data();
    p.norm = m.writing(p.norm);
    parallel_planes(p, m.numel, [&](int64_t begin, int64_t end) { norm_pool_kernels().grad(p, begin, end); });
  });
  return {grads[0], grads[1], grads[2]};
}

}  // namespace
}  // namespace cpu

void register_norm_pool_cpu(torch::Library& m) {
  using namespace cpu;
  m.impl("_batch_norm_act_max_pool2d_apply", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&pool_apply_cpu>::call)));
  m.impl("_batch_norm_act_max_pool2d_forward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&pool_forward_cpu>::call)));
  m.impl("_batch_norm_act_max_pool2d_backward", c10::DispatchKey::CPU,
         TORCH_FN((FromSchema<&pool_backward_cpu>::call)));
}

}  // namespace tsmem
