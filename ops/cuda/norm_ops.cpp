// The raw normalisation ops on a CUDA device: norm_ops.h tells what they do. Nothing here waits for the device.
#include "norm_ops.h"

#include <ATen/native/Normalization.h>

#include <cstdlib>
#include <cstring>

#include "act_table.h"
#include "cuda/device.h"
#include "cuda/norm.h"
#include "cuda/pool.h"
#include "cuda/raw_ops.h"
#include "cuda/trial.h"
#include "raw_op.h"

namespace tsmem::cuda {
namespace {

using at::IntArrayRef;
using at::Tensor;

// x as the kernels see it; x is dense in its layout. The operands are still to be set.
NormArgs view(const Tensor& x, bool channels_last, const Act& act) {
  NormArgs a;
  a.dtype = cpu_dtype(x.scalar_type());
  a.act = act_for(x.scalar_type(), act);
  a.numel = x.numel();
  a.channels = x.size(1);
  if (a.numel == 0) return a;
  if (channels_last || x.dim() == 2 || a.numel == x.size(0) * a.channels) {
    a.outer = a.numel / a.channels;
  } else {
    a.outer = x.size(0);
    a.inner = a.numel / (a.outer * a.channels);
  }
  a.by_inner = Divider(a.inner, a.numel);
  a.by_channels = Divider(a.channels, a.numel);
  return a;
}

// What the mask has room for: each plane's bits in whole bytes, as on other devices; fewer are used.
int64_t mask_bytes(const NormArgs& a) {
  return a.planar() ? a.outer * a.channels * ((a.inner + 7) / 8) : (a.numel + 7) / 8;
}

// Statistics as the kernels read them.
Tensor statistics(const OptTensor& t, at::ScalarType dtype) {
  return t && t->defined() ? t->to(acc_type(dtype)).contiguous() : Tensor();
}

void set_coefficients(NormArgs& a, const Tensor& mean, const Tensor& invstd, const OptTensor& weight,
                      const OptTensor& bias) {
  a.mean = read(mean);
  a.invstd = read(invstd);
  a.weight = numbers(weight);
  a.bias = numbers(bias);
}

Tensor workspace(const Tensor& like, int64_t numbers) {
  return at::empty({numbers}, like.options().dtype(at::kDouble));
}

// Mean and inverse deviation of a.x into `mean` and `invstd`, and the running statistics in training; on_chip: in one
// kernel with norm_apply().
void statistics_of(const NormArgs& a, const Tensor& x, const BatchNormArgs& bn, const Tensor& mean,
                   const Tensor& invstd, Stream stream, bool on_chip = false) {
  StatsArgs s;
  Tensor partial;
  const Split parts = split(a, 1);
  if (bn.training) {
    partial = workspace(x, 3 * a.channels * parts.parts());
    s.partial = partial.const_data_ptr<double>();
    s.parts = parts.parts();
  }
  s.channels = a.channels;
  s.running_mean = numbers(bn.running_mean, bn.training);
  s.running_var = numbers(bn.running_var, bn.training);
  s.momentum = bn.momentum;
  s.eps = bn.eps;
  s.f64 = a.dtype == Dtype::f64;
  s.mean = write(mean);
  s.invstd = write(invstd);
  if (on_chip) return norm_forward(a, parts, s, partial.mutable_data_ptr<double>(), stream);
  if (bn.training) norm_stats(a, parts, partial.mutable_data_ptr<double>(), stream);
  norm_finish_stats(s, stream);
}

// TSMEM_PERSISTENT=0 in the environment: never by one kernel that keeps a map on chip.
bool may_keep_on_chip() {
  static const bool may = [] {
    const char* set = std::getenv("TSMEM_PERSISTENT");
    return !set || std::strcmp(set, "0") != 0;
  }();
  return may;
}

// What the time of a way depends on beside the map, bits of a number.
constexpr int64_t kOther = 1, kMask = 2, kInPlace = 4, kTwoGradients = 8;

std::string name_of(Computed what, const Tensor& x, const NormArgs& a, int64_t operands) {
  return c10::str(what == Computed::norm ? "batch norm" : "batch norm's gradient", " on ", x.device(), ": ",
                  x.scalar_type(), ", ", a.outer, " x ", a.channels, ", activation ", static_cast<int>(a.act.kind),
                  operands & kOther ? ", other" : "", operands & kMask ? ", mask" : "",
                  operands & kInPlace ? ", in place" : "", operands & kTwoGradients ? ", two gradients" : "");
}

// Nothing where numbers that are not finite make the same results differ, and where a result is all zeros.
std::optional<bool> all_equal(at::ArrayRef<Tensor> a, at::ArrayRef<Tensor> b) {
  bool finite = true, zeros = false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined()) continue;
    const bool numbers = a[i].is_floating_point();
    if (at::equal(a[i], b[i])) {
      zeros = zeros || (numbers && !at::any(a[i]).item<bool>());
    } else {
      if (numbers) finite = finite && at::isfinite(a[i]).all().item<bool>();
      if (finite) return false;
    }
  }
  return finite && !zeros ? std::optional(true) : std::nullopt;
}

// Whether one kernel computes it, of which once(on_chip) gives the results, without effects. Of a device that captures
// a graph nothing is asked: what was found before holds.
template <class Once>
bool takes_on_chip(Computed what, const Tensor& x, const NormArgs& a, int64_t operands, bool (*fits)(const NormArgs&),
                   const Once& once) {
  const TrialKey key{{static_cast<int64_t>(what), x.get_device(), static_cast<int64_t>(a.dtype), a.channels,
                      static_cast<int64_t>(a.act.kind), operands},
                     {a.outer}};
  if (const auto known = known_to_take_fused(key)) return *known;
  if (is_capturing() || !fits(a)) return false;
  return takes_fused(
      key, [&] { return name_of(what, x, a, operands); }, [&] { return once(false); }, [&] { return once(true); },
      all_equal);
}

// PyTorch's own kernels give a result the input's strides; cuDNN, which it takes for some dtypes and sizes, knows
// contiguous maps and channels_last alone.
Tensor in_aten_layout(const Tensor& out, [[maybe_unused]] const Tensor& input,
                      [[maybe_unused]] const BatchNormArgs& bn) {
#ifndef TSMEM_EMULATE_CUDA
  if (out.strides() == input.strides() || !input.is_non_overlapping_and_dense()) return out;
  const auto tensor = [](const OptTensor& t) { return t ? *t : Tensor(); };
  if (at::native::_select_batch_norm_backend(input, tensor(bn.weight), tensor(bn.bias), tensor(bn.running_mean),
                                             tensor(bn.running_var), bn.training,
                                             bn.eps) == at::native::BatchNormBackend::Native)
    return at::empty_strided(input.sizes(), input.strides(), out.options()).copy_(out);
#endif
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& running_mean, const OptTensor& running_var,
                                                   const OptTensor& other, bool training, double momentum, double eps,
                                                   const Act& act, bool keep_mask) {
  const OnDevice on(input);
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  NormArgs a = view(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  // The results: output, mean, inverse deviation, mask.
  const auto memory = [&]() -> std::array<Tensor, 4> {
    return {at::empty_like(x, x.options(), format), at::empty({a.channels}, options), at::empty({a.channels}, options),
            at::empty({keep_mask ? mask_bytes(a) : 0}, x.options().dtype(at::kByte))};
  };
  const auto to = memory();
  if (a.numel == 0) return {to[0], to[1], to[2], to[3]};
  a.aligned = aligned({x, z, to[0]});
  a.x = read(x);
  a.other = read(z);
  const auto compute = [&](const std::array<Tensor, 4>& into, const BatchNormArgs& bn, bool on_chip) {
    const auto& [out, mean, invstd, mask] = into;
    NormArgs now = a;
    now.out = write(out);
    if (keep_mask) now.mask = mask.mutable_data_ptr<uint8_t>();
    set_coefficients(now, mean, invstd, weight, bias);
    statistics_of(now, x, bn, mean, invstd, on.stream, on_chip);
    if (!on_chip) norm_apply(now, on.stream);
  };
  bool on_chip = false;
  if (training && may_keep_on_chip() && norm_can_be_kept(a)) {
    // Without running statistics, which only the call itself may move.
    const auto once = [&](bool that) {
      auto into = memory();
      compute(into, {weight, bias, {}, {}, true, momentum, eps}, that);
      return into;
    };
    const int64_t operands = (other ? kOther : 0) | (keep_mask ? kMask : 0);
    on_chip = takes_on_chip(Computed::norm, x, a, operands, norm_forward_fits, once);
  }
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  compute(to, bn, on_chip);
  return {in_aten_layout(to[0], input, bn), to[1], to[2], to[3]};
}

// act(pre + other) from statistics that are known. `out`: memory to write to, which may be other's.
Tensor apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
             const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out_memory) {
  const OnDevice on(input);
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  NormArgs a = view(x, channels_last, act);
  const bool reuse = out_memory && out_memory->strides() == x.strides();
  Tensor out = reuse ? *out_memory : at::empty_like(x, x.options(), format);
  if (a.numel == 0) return out;
  const Tensor mu = statistics(mean, x.scalar_type()), s = statistics(invstd, x.scalar_type());
  a.aligned = aligned({x, z, out});
  a.x = read(x);
  a.other = read(z);
  a.out = write(out);
  set_coefficients(a, mu, s, weight, bias);
  norm_apply(a, on.stream);
  return out;
}

// Sums of a reduction into the gradients of weight and bias and, with `through`, the two terms of the input's.
struct Sums {
  Tensor weight, bias, tilt, level;
  SumsArgs args;
  Sums() = default;
  Sums(const NormArgs& a, const Split& parts, const Tensor& partial, double count, bool want_weight, bool want_bias,
       bool through, const at::TensorOptions& options) {
    const auto vector = [&](bool wanted) { return wanted ? at::empty({a.channels}, options) : Tensor(); };
    weight = vector(want_weight), bias = vector(want_bias), tilt = vector(through), level = vector(through);
    args.partial = partial.const_data_ptr<double>();
    args.parts = parts.parts();
    args.channels = a.channels;
    args.count = count;
    args.f64 = a.dtype == Dtype::f64;
    args.invstd = a.invstd;
    args.weight = a.weight;
    args.grad_weight = write(weight);
    args.grad_bias = write(bias);
    args.tilt = write(tilt);
    args.level = write(level);
  }
};

// Where no precision is lost the first pass leaves a smooth activation's gradient, which is expensive, in memory that
// the second one has to write anyway.
bool first_pass_leaves(const Act& act, const Tensor& grad) {
  return !one_bit(act.kind) && act.kind != ActKind::identity && grad.scalar_type() == acc_type(grad.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const OptTensor& input,
                                                    const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                    const Tensor& invstd, const OptTensor& other, const OptTensor& mask,
                                                    bool training, bool channels_last, const Act& act,
                                                    std::array<bool, 4> want, bool overwrite) {
  const OnDevice on(grad_output);
  const auto format = feature_format(grad_output.dim(), channels_last);
  const Tensor g = grad_output.contiguous(format);
  const Tensor x = input ? input->contiguous(format) : Tensor(), z = other ? other->contiguous(format) : Tensor();
  const Tensor bits = mask ? mask->contiguous() : Tensor();
  NormArgs a = view(g, channels_last, act);
  const auto options = g.options().dtype(acc_type(g.scalar_type()));
  std::array<Tensor, 4> grads;
  // The gradient's own memory serves for one of the results, or that of its copy in this layout for the input's.
  const bool copied = !g.is_same(grad_output);
  const int reused = overwrite && !copied && want[3] ? 3 : (overwrite || copied) && !want[3] && want[0] ? 0 : -1;
  for (int i : {0, 3})
    if (want[i]) grads[i] = i == reused ? g : at::empty_like(g, g.options(), format);
  if (a.numel == 0) {
    for (int i : {1, 2})
      if (want[i]) grads[i] = at::zeros({a.channels}, options);
    return {grads[0], grads[1], grads[2], grads[3]};
  }
  const Tensor mu = statistics(mean, g.scalar_type()), s = statistics(invstd, g.scalar_type());
  a.aligned = aligned({g, x, z, grads[0], grads[3]});
  a.from_mask = bits.defined();
  a.grad = read(g);
  a.x = read(x);
  a.other = read(z);
  if (bits.defined()) a.mask = const_cast<uint8_t*>(bits.const_data_ptr<uint8_t>());
  set_coefficients(a, mu, s, weight, bias);

  const bool through = training && want[0], sums_wanted = through || want[1] || want[2];
  // The first pass overwrites the gradient, or leaves the activation's.
  const bool from_first = sums_wanted && (reused == 3 || (want[0] && first_pass_leaves(act, g)));
  // Into into[0] and into[3], and what it makes for the other two.
  const auto compute = [&](std::array<Tensor, 4>& into, bool on_chip) {
    NormArgs first = a;
    first.out = write(into[0]);
    first.grad_other = write(into[3]);
    NormArgs second = first;
    if (from_first) {
      if (!first.grad_other && !on_chip) first.grad_other = first.out;
      second.grad = first.grad_other;
      second.other = nullptr;
      second.from_mask = false;
      second.act = {};
    }
    Sums sums;
    if (sums_wanted) {
      second.grad_other = nullptr;
      const Split parts = split(first, 1);
      const Tensor partial = workspace(g, 2 * a.channels * parts.parts());
      sums = Sums(first, parts, partial, static_cast<double>(a.outer * a.inner), want[1], want[2], through, options);
      into[1] = sums.weight;
      into[2] = sums.bias;
      second.tilt = read(sums.tilt);
      second.level = read(sums.level);
      auto* numbers = partial.mutable_data_ptr<double>();
      if (on_chip) return norm_backward(first, second, parts, sums.args, numbers, from_first, on.stream);
      norm_reduce(first, parts, numbers, on.stream);
      norm_finish_sums(sums.args, on.stream);
      if (!want[0]) return;
    }
    if (want[0] || want[3]) norm_grad(second, on.stream);
  };
  bool on_chip = false;
  if (through && x.defined() && may_keep_on_chip() && norm_can_be_kept(a)) {
    const auto once = [&](bool that) {
      std::array<Tensor, 4> into;
      for (int i : {0, 3})
        if (want[i]) into[i] = at::empty_like(g, g.options(), format);
      compute(into, that);
      return into;
    };
    const int64_t operands = (z.defined() ? kOther : 0) | (a.from_mask ? kMask : 0) | (from_first ? kInPlace : 0) |
                             (want[3] ? kTwoGradients : 0);
    on_chip = takes_on_chip(Computed::norm_gradient, g, a, operands, norm_backward_fits, once);
  }
  compute(grads, on_chip);
  return {grads[0], grads[1], grads[2], grads[3]};
}

// --- Group norm: statistics of groups, each as one channel of one image; all else of that image's N x C channels

// x, contiguous, as one image of so many channels.
NormArgs one_image(const Tensor& x, int64_t channels, const Act& act) {
  NormArgs a = view(x.view({1, channels, x.numel() / channels}), false, act);
  a.x = read(x);
  return a;
}

// A number for each of the N x C channels, from each group's.
Tensor of_group_channels(const Tensor& of_groups, int64_t each) {
  return of_groups.view({-1, 1}).expand({-1, each}).reshape({-1});
}

// ... and from each channel's.
OptTensor of_image_channels(const OptTensor& of_channels, int64_t images) {
  return of_channels && of_channels->defined() ? OptTensor(of_channels->repeat({images})) : OptTensor();
}

// What the kernels read of each of the N x C channels.
struct GroupCoefficients {
  Tensor mean, invstd;
  OptTensor weight, bias;
  GroupCoefficients(const Tensor& x, const OptTensor& of_weight, const OptTensor& of_bias, const Tensor& of_mean,
                    const Tensor& of_invstd)
      : mean(of_group_channels(of_mean, x.size(0) * x.size(1) / of_mean.numel())),
        invstd(of_group_channels(of_invstd, x.size(0) * x.size(1) / of_mean.numel())),
        weight(of_image_channels(of_weight, x.size(0))),
        bias(of_image_channels(of_bias, x.size(0))) {}
  void use(NormArgs& a) const { set_coefficients(a, mean, invstd, weight, bias); }
};

Tensor group_apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                   const Tensor& invstd, const Act& act, const OptTensor& out_memory) {
  const OnDevice on(input);
  const Tensor x = input.contiguous();
  const bool reuse = out_memory && out_memory->is_contiguous();
  Tensor out = reuse ? *out_memory : at::empty_like(x);
  NormArgs a = one_image(x, x.size(0) * x.size(1), act);
  a.aligned = aligned({x, out});
  a.out = write(out);
  const GroupCoefficients coefficients(x, weight, bias, mean, invstd);
  coefficients.use(a);
  norm_apply(a, on.stream);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> group_forward(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                                 int64_t groups, double eps, const Act& act) {
  const OnDevice on(input);
  const Tensor x = input.contiguous();
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  const int64_t of_all = x.size(0) * groups;
  const Tensor mean = at::empty({of_all}, options), invstd = at::empty({of_all}, options);
  NormArgs whole = one_image(x, of_all, {});
  whole.aligned = aligned({x});
  statistics_of(whole, x, {{}, {}, {}, {}, true, 0, eps}, mean, invstd, on.stream);
  return {group_apply(x, weight, bias, mean, invstd, act, {}), mean, invstd};
}

// The formula is in cpu/group_norm.cpp.
std::tuple<Tensor, Tensor, Tensor> group_backward(const Tensor& grad_output, const Tensor& input,
                                                  const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                  const Tensor& invstd, const Act& act, std::array<bool, 3> want,
                                                  bool overwrite) {
  const OnDevice on(grad_output);
  const Tensor x = input.contiguous(), g = grad_output.contiguous();
  const int64_t images = x.size(0), channels = x.size(1), of_all = mean.numel(), each = images * channels / of_all;
  NormArgs first = one_image(x, images * channels, act);
  Tensor out;
  if (want[0]) out = overwrite || !g.is_same(grad_output) ? g : at::empty_like(x);
  first.aligned = aligned({g, x, out});
  first.grad = read(g);
  first.out = write(out);
  const GroupCoefficients coefficients(x, weight, bias, mean, invstd);
  coefficients.use(first);
  NormArgs second = first;
  if (want[0] && first_pass_leaves(act, g)) {
    first.grad_other = first.out;
    second.grad = first.out;
    second.act = {};
  }
  const Split parts = split(first, 1);
  const Tensor partial = workspace(g, 2 * first.channels * parts.parts());
  const Sums sums(first, parts, partial, 1, /*want_weight=*/true, /*want_bias=*/true, /*through=*/false,
                  mean.options());
  norm_reduce(first, parts, partial.mutable_data_ptr<double>(), on.stream);
  norm_finish_sums(sums.args, on.stream);
  if (want[0]) {
    const auto weighted = [&](const Tensor& of_channels) {
      const Tensor sum = coefficients.weight ? of_channels * *coefficients.weight : of_channels;
      return sum.view({of_all, each}).sum(1);
    };
    const double n = static_cast<double>(x.numel()) / static_cast<double>(of_all);
    const Tensor tilt = of_group_channels(weighted(sums.weight) * invstd * invstd / n, each),
                 level = of_group_channels(weighted(sums.bias) * invstd / n, each);
    second.tilt = read(tilt);
    second.level = read(level);
    norm_grad(second, on.stream);
  }
  const auto over_images = [&](bool wanted, const Tensor& of_all_channels) {
    return wanted ? of_all_channels.view({images, channels}).sum(0) : Tensor();
  };
  return {out, over_images(want[1], sums.weight), over_images(want[2], sums.bias)};
}

// --- With max pooling

PoolArgs pool_args(const NormArgs& norm, const Tensor& x, bool channels_last, IntArrayRef out_size, IntArrayRef kernel,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  PoolArgs p;
  p.norm = norm;
  p.channels_last = channels_last;
  p.position_bytes = static_cast<int32_t>(c10::elementSize(position_type(kernel)));
  p.batch = x.size(0);
  PoolAxis* const axes[2] = {&p.h, &p.w};
  for (int d = 0; d < 2; ++d) {
    PoolAxis& axis = *axes[d];
    axis.in = x.size(2 + d), axis.out = out_size[d];
    axis.window = kernel[d], axis.stride = stride[d], axis.padding = padding[d], axis.dilation = dilation[d];
  }
  p.x = norm.x;
  return p;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pool_forward_op(
    const Tensor& input, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
    const OptTensor& running_var, bool training, double momentum, double eps, const Act& act, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, IntArrayRef out_size, bool keep_positions) {
  const OnDevice on(input);
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format);
  NormArgs a = view(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor mean = at::empty({a.channels}, options), invstd = at::empty({a.channels}, options);
  const std::vector<int64_t> sizes{x.size(0), x.size(1), out_size[0], out_size[1]};
  Tensor out = at::empty(sizes, x.options(), format);
  const auto kind = x.options().dtype(position_type(kernel));
  Tensor positions = keep_positions ? at::empty(sizes, kind, format) : at::empty({0}, kind);
  if (a.numel == 0) return {out, mean, invstd, positions};
  a.aligned = aligned({x, out});
  a.x = read(x);
  statistics_of(a, x, {weight, bias, running_mean, running_var, training, momentum, eps}, mean, invstd, on.stream);
  set_coefficients(a, mean, invstd, weight, bias);
  PoolArgs p = pool_args(a, x, channels_last, out_size, kernel, stride, padding, dilation);
  p.out = write(out);
  if (keep_positions) p.positions = write(positions);
  prepare(p, /*of_outputs=*/true);
  norm_pool_forward(p, on.stream);
  return {out, mean, invstd, positions};
}

// The pooled output again, from statistics and positions that are known.
Tensor pool_apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                  const Tensor& invstd, const Tensor& positions, const Act& act, IntArrayRef kernel, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, IntArrayRef out_size) {
  const OnDevice on(input);
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format), kept = positions.contiguous(format);
  NormArgs a = view(x, channels_last, act);
  Tensor out = at::empty({x.size(0), x.size(1), out_size[0], out_size[1]}, x.options(), format);
  if (a.numel == 0) return out;
  const Tensor mu = statistics(mean, x.scalar_type()), s = statistics(invstd, x.scalar_type());
  a.x = read(x);
  set_coefficients(a, mu, s, weight, bias);
  PoolArgs p = pool_args(a, x, channels_last, out_size, kernel, stride, padding, dilation);
  p.out = write(out);
  p.positions = const_cast<void*>(read(kept));
  prepare(p, /*of_outputs=*/true);
  norm_pool_again(p, on.stream);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> pool_backward_op(const Tensor& grad_output, const Tensor& input,
                                                    const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                    const Tensor& invstd, const Tensor& positions, bool training,
                                                    bool channels_last, const Act& act, IntArrayRef kernel,
                                                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                    std::array<bool, 3> want) {
  const OnDevice on(input);
  const auto format = feature_format(4, channels_last);
  const Tensor g = grad_output.contiguous(format), x = input.contiguous(format), kept = positions.contiguous(format);
  NormArgs a = view(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor grads[3];
  if (want[0]) grads[0] = at::empty_like(x, x.options(), format);
  if (a.numel == 0) {
    for (int i : {1, 2})
      if (want[i]) grads[i] = at::zeros({a.channels}, options);
    return {grads[0], grads[1], grads[2]};
  }
  const Tensor mu = statistics(mean, x.scalar_type()), s = statistics(invstd, x.scalar_type());
  a.aligned = aligned({g, x, grads[0]});
  a.x = read(x);
  set_coefficients(a, mu, s, weight, bias);
  PoolArgs p = pool_args(a, x, channels_last, g.sizes().slice(2), kernel, stride, padding, dilation);
  p.grad = read(g);
  p.positions = const_cast<void*>(read(kept));
  const bool through = training && want[0];
  Sums sums;
  if (through || want[1] || want[2]) {
    PoolArgs first = p;  // the norm's map is the pooled one
    first.norm.numel = g.numel();
    const int64_t pixels = p.h.out * p.w.out;
    first.norm.outer = channels_last ? p.batch * pixels : p.batch;
    first.norm.inner = channels_last ? 1 : pixels;
    prepare(first, /*of_outputs=*/true);
    const Split parts = split(first.norm, 1);
    const Tensor partial = workspace(x, 2 * a.channels * parts.parts());
    norm_pool_reduce(first, parts, partial.mutable_data_ptr<double>(), on.stream);
    sums = Sums(a, parts, partial, static_cast<double>(a.outer * a.inner), want[1], want[2], through, options);
    norm_finish_sums(sums.args, on.stream);
    grads[1] = sums.weight;
    grads[2] = sums.bias;
  }
  if (!want[0]) return {grads[0], grads[1], grads[2]};
  p.norm.tilt = read(sums.tilt);
  p.norm.level = read(sums.level);
  p.out = write(grads[0]);
  prepare(p, /*of_outputs=*/false);
  norm_pool_backward(p, on.stream);
  return {grads[0], grads[1], grads[2]};
}

// --- The gradient of a scale

// Sums of grad * act(pre): per image and channel ([N, C], from a feature map of three dimensions or more), or, with
// last_dim, along the last dimension ([C]).
Tensor scale_grad(const Tensor& grad_output, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                  const OptTensor& mean, const OptTensor& invstd, bool last_dim, const Act& act) {
  const OnDevice on(input);
  const bool channels_last = !last_dim && is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  Tensor x = input.contiguous(format), g = grad_output.contiguous(format);
  if (last_dim) x = x.view({-1, x.size(-1)}), g = g.view({-1, g.size(-1)});
  NormArgs a = view(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  const int64_t images = last_dim ? 1 : x.size(0);
  Tensor out = last_dim ? at::empty({a.channels}, options) : at::empty({images, a.channels}, options);
  if (a.numel == 0) return out.zero_();
  const Tensor mu = statistics(mean, x.scalar_type()), s = statistics(invstd, x.scalar_type());
  a.aligned = aligned({x, g});
  a.x = read(x);
  a.grad = read(g);
  set_coefficients(a, mu, s, weight, bias);
  const Split parts = split(a, images);
  const Tensor partial = workspace(x, 2 * images * a.channels * parts.parts());
  norm_scale_grad(a, parts, partial.mutable_data_ptr<double>(), write(out), on.stream);
  return out;
}

}  // namespace

void implement_norm(torch::Library& m) {
  m.impl("_batch_norm_act_apply", TORCH_FN((FromSchema<&apply>::call)));
  m.impl("_batch_norm_act_max_pool2d_apply", TORCH_FN((FromSchema<&pool_apply>::call)));
  m.impl("_batch_norm_act_forward", TORCH_FN((FromSchema<&forward>::call)));
  m.impl("_batch_norm_act_backward", TORCH_FN((FromSchema<&backward>::call)));
  m.impl("_batch_norm_act_max_pool2d_forward", TORCH_FN((FromSchema<&pool_forward_op>::call)));
  m.impl("_batch_norm_act_max_pool2d_backward", TORCH_FN((FromSchema<&pool_backward_op>::call)));
  m.impl("_group_norm_act_forward", TORCH_FN((FromSchema<&group_forward>::call)));
  m.impl("_group_norm_act_apply", TORCH_FN((FromSchema<&group_apply>::call)));
  m.impl("_group_norm_act_backward", TORCH_FN((FromSchema<&group_backward>::call)));
  m.impl("_scale_grad", TORCH_FN((FromSchema<&scale_grad>::call)));
}

}  // namespace tsmem::cuda
