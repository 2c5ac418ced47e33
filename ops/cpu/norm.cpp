// The raw normalisation ops on the CPU: splits work over threads, keeps statistics per channel, calls the kernels.
#include "cpu/norm.h"

#include <cmath>

#include "act_table.h"
#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

void update_running(const OptTensor& running, const std::vector<double>& now, double momentum) {
  if (!running || !running->defined()) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, running->scalar_type(), "batch_norm", [&] {
    scalar_t* r = running->mutable_data_ptr<scalar_t>();
    const int64_t step = running->stride(0);
    for (size_t c = 0; c < now.size(); ++c, r += step)
      *r = static_cast<scalar_t>(momentum * now[c] + (1 - momentum) * static_cast<double>(*r));
  });
}

// Statistics and, where there is an output, act(pre + other).
template <class A>
void forward_as(Map& m, const BatchNormArgs& bn, Tensor& mean_out, Tensor& invstd_out) {
  NormArgs& a = m.args;
  const NormKernels& kernels = norm_kernels();
  const Vector<A> weight(bn.weight, 1), bias(bn.bias, 0);
  A *mean = mean_out.mutable_data_ptr<A>(), *invstd = invstd_out.mutable_data_ptr<A>();
  Coefficients<A> coefficients(m);
  coefficients.use(a);
  if (!bn.training) {
    const Vector<double> running_mean(bn.running_mean, 0), running_var(bn.running_var, 1);
    for (int64_t c = 0; c < a.channels; ++c) {
      mean[c] = static_cast<A>(running_mean[c]);
      invstd[c] = static_cast<A>(1 / std::sqrt(running_var[c] + bn.eps));
      coefficients.set(c, mean[c], invstd[c], weight[c], bias[c]);
    }
    coefficients.repeat(m);
    if (a.out) m.parallel([&](int64_t, NormRange r) { kernels.apply(m.writing(a), r); });
    return;
  }
  const double count = static_cast<double>(a.outer * a.inner);
  std::vector<double> means(a.channels), m2s(a.channels);
  auto finish = [&](int64_t c0, int64_t c1) {
    for (int64_t c = c0; c < c1; ++c)
      if (!std::isfinite(means[c]) || !std::isfinite(m2s[c])) kernels.exact_stats(a, c, &means[c], &m2s[c]);
    const double* m2 = m2s.data();
    for (int64_t c = c0; c < c1; ++c) invstd[c] = static_cast<A>(1 / std::sqrt(m2[c] / count + bn.eps));
    for (int64_t c = c0; c < c1; ++c) {
      if (bn.eps == 0 && m2[c] / count == 0) invstd[c] = 0;
      mean[c] = static_cast<A>(means[c]);
      coefficients.set(c, mean[c], invstd[c], weight[c], bias[c]);
    }
  };
  if (m.by_channel) {
    m.parallel([&](int64_t, NormRange r) {
      kernels.stats(a, r, &means[r.c0], &m2s[r.c0]);
      finish(r.c0, r.c1);
      if (a.out) kernels.apply(m.writing(a), r);
    });
  } else {
    stats_of_all(m, means, m2s);
    finish(0, a.channels);
    coefficients.repeat(m);
    if (a.out) m.parallel([&](int64_t, NormRange r) { kernels.apply(m.writing(a), r); });
  }
  update_running(bn.running_mean, means, bn.momentum);
  for (double& v : m2s) v /= count - 1;
  update_running(bn.running_var, m2s, bn.momentum);
}

template <class A>
void backward(Map& m, const NormBackward& b, std::array<bool, 4> want, Tensor& grad_weight, Tensor& grad_bias) {
  NormArgs& a = m.args;
  const NormKernels& kernels = norm_kernels();
  const Vector<A> invstd(b.invstd, 1);
  Coefficients<A> coefficients(m, b.weight, b.bias, b.mean, b.invstd);
  coefficients.use(a);
  Table<A> tilt(m), level(m);
  a.slope = a.scale;
  const bool through_stats = b.training && want[0];
  const bool sums = through_stats || want[1] || want[2] || want[3];
  if (through_stats) a.tilt = tilt.values.data(), a.level = level.values.data();

  const NormArgs second = second_pass(a, sums, sizeof(A) == b.grad.element_size());

  const double share = 1 / static_cast<double>(a.outer * a.inner);
  A *weight_grad = want[1] ? grad_weight.mutable_data_ptr<A>() : nullptr,
    *bias_grad = want[2] ? grad_bias.mutable_data_ptr<A>() : nullptr;
  auto finish = [&](int64_t c, double sum, double dot) {
    dot *= static_cast<double>(invstd[c]);
    if (weight_grad) weight_grad[c] = static_cast<A>(dot);
    if (bias_grad) bias_grad[c] = static_cast<A>(sum);
    const double scale = static_cast<double>(coefficients.scale[c]) * share;
    tilt[c] = static_cast<A>(scale * static_cast<double>(invstd[c]) * dot);
    level[c] = static_cast<A>(scale * sum);
  };
  if (m.by_channel || !sums) {
    m.parallel([&](int64_t, NormRange r) {
      if (sums) {
        std::vector<double> sum(r.c1 - r.c0), dot(r.c1 - r.c0);
        kernels.reduce(a, r, sum.data(), dot.data());
        for (int64_t c = r.c0; c < r.c1; ++c) finish(c, sum[c - r.c0], dot[c - r.c0]);
      }
      if (want[0]) kernels.grad(m.writing(second), r);
    });
    return;
  }
  std::vector<double> sum(a.channels), dot(a.channels);
  sums_of_all(m, a, sum, dot);
  for (int64_t c = 0; c < a.channels; ++c) finish(c, sum[c], dot[c]);
  tilt.repeat(m), level.repeat(m);
  if (want[0]) m.parallel([&](int64_t, NormRange r) { kernels.grad(m.writing(second), r); });
}

}  // namespace

void stats_of_all(const Map& m, std::vector<double>& mean, std::vector<double>& m2) {
  const NormArgs& a = m.args;
  std::vector<double> part_mean(m.tasks * a.channels), part_m2(m.tasks * a.channels);
  m.parallel([&](int64_t t, NormRange r) {
    norm_kernels().stats(a, r, &part_mean[t * a.channels], &part_m2[t * a.channels]);
  });
  double n = 0;
  for (int64_t t = 0; t < m.tasks; ++t) {
    const NormRange r = m.range(t);
    const double k = static_cast<double>((r.o1 - r.o0) * a.inner), share = k / (n + k);
    for (int64_t c = 0; c < a.channels; ++c) {
      const double delta = part_mean[t * a.channels + c] - mean[c];
      mean[c] += delta * share;
      m2[c] += part_m2[t * a.channels + c] + delta * delta * n * share;
    }
    n += k;
  }
}

void sums_of_all(const Map& m, const NormArgs& a, std::vector<double>& sum, std::vector<double>& dot) {
  std::vector<double> part_sum(m.tasks * a.channels), part_dot(m.tasks * a.channels);
  m.parallel([&](int64_t t, NormRange r) {
    norm_kernels().reduce(a, r, &part_sum[t * a.channels], &part_dot[t * a.channels]);
  });
  for (int64_t t = 0; t < m.tasks; ++t)
    for (int64_t c = 0; c < a.channels; ++c)
      sum[c] += part_sum[t * a.channels + c], dot[c] += part_dot[t * a.channels + c];
}

NormArgs second_pass(NormArgs& first, bool reduces, bool exact) {
  bool from_first = first.grad_other && first.grad_other == first.grad;
  if (reduces && first.out && !one_bit(first.act.kind) && first.act.kind != ActKind::identity && exact) {
    if (!first.grad_other) first.grad_other = first.out;
    from_first = true;
  }
  NormArgs second = first;
  if (from_first) {
    second.grad = first.grad_other;
    second.grad_other = nullptr;
    second.other = nullptr;
    second.from_mask = false;
    second.act = {};
  }
  return second;
}

void forward(Map& m, const BatchNormArgs& bn, Tensor& mean, Tensor& invstd) {
  with_acc(mean.scalar_type(), [&](auto zero) { forward_as<decltype(zero)>(m, bn, mean, invstd); });
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& input, const OptTensor& weight,
                                                       const OptTensor& bias, const OptTensor& running_mean,
                                                       const OptTensor& running_var, const OptTensor& other,
                                                       bool training, double momentum, double eps, const Act& act,
                                                       bool keep_mask) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  Map m(x, channels_last, act);
  Tensor out = at::empty_like(x, x.options(), format);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor mean = at::empty({m.args.channels}, options), invstd = at::empty({m.args.channels}, options);
  Tensor mask = at::empty({keep_mask ? m.args.mask_bytes() : 0}, x.options().dtype(at::kByte));
  m.args.x = x.const_data_ptr();
  m.args.out = out.mutable_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  if (keep_mask) m.args.mask = mask.mutable_data_ptr<uint8_t>();
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  forward(m, bn, mean, invstd);
  return {out, mean, invstd, mask};
}

// act(pre + other) from statistics that are known. `out`: memory to write to, which may be other's.
Tensor apply_cpu(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                 const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out_memory) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  Map m(x, channels_last, act);
  const bool reuse = out_memory && out_memory->strides() == x.strides();
  Tensor out = reuse ? *out_memory : at::empty_like(x, x.options(), format);
  m.args.x = x.const_data_ptr();
  m.args.out = out.mutable_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.parallel([&](int64_t, NormRange r) { norm_kernels().apply(m.writing(m.args), r); });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_output, const OptTensor& input,
                                                        const OptTensor& weight, const OptTensor& bias,
                                                        const Tensor& mean, const Tensor& invstd,
                                                        const OptTensor& other, const OptTensor& mask, bool training,
                                                        bool channels_last, const Act& act, std::array<bool, 4> want,
                                                        bool overwrite) {
  const auto format = feature_format(grad_output.dim(), channels_last);
  const Tensor g = grad_output.contiguous(format);
  const Tensor x = input ? input->contiguous(format) : Tensor(), z = other ? other->contiguous(format) : Tensor();
  const Tensor bits = mask ? mask->contiguous() : Tensor();
  Map m(g, channels_last, act);
  m.args.from_mask = bits.defined();
  m.args.grad = g.const_data_ptr();
  if (x.defined()) m.args.x = x.const_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  if (bits.defined()) m.args.mask = const_cast<uint8_t*>(bits.const_data_ptr<uint8_t>());
  Tensor grads[4];
  const auto options = g.options().dtype(acc_type(g.scalar_type()));
  // The gradient's own memory serves for one of the results, or that of its copy in this layout for the input's.
  const bool copied = !g.is_same(grad_output);
  const int reused = overwrite && !copied && want[3] ? 3 : (overwrite || copied) && !want[3] && want[0] ? 0 : -1;
  for (int i : {0, 3})
    if (want[i]) grads[i] = i == reused ? g : at::empty_like(g, g.options(), format);
  for (int i : {1, 2})
    if (want[i]) grads[i] = at::empty({m.args.channels}, options);
  if (want[0]) m.args.out = grads[0].mutable_data_ptr();
  if (want[3]) m.args.grad_other = grads[3].mutable_data_ptr();
  const NormBackward b{g, input, weight, bias, mean, invstd, other, mask, training, channels_last};
  with_acc(g.scalar_type(), [&](auto a) { backward<decltype(a)>(m, b, want, grads[1], grads[2]); });
  return {grads[0], grads[1], grads[2], grads[3]};
}

}  // namespace
}  // namespace cpu

void register_norm_cpu(torch::Library& m) {
  using namespace cpu;
  m.impl("_batch_norm_act_apply", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&apply_cpu>::call)));
  m.impl("_batch_norm_act_forward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&forward_cpu>::call)));
  m.impl("_batch_norm_act_backward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&backward_cpu>::call)));
}

}  // namespace tsmem
