// The raw norm ops by PyTorch's operators, for devices that have no kernels of ours: what is kept between forward and
// backward is the same; time, and the memory that a call needs while it runs, are those of PyTorch's operators.
#include "act_table.h"
#include "composed/composed.h"
#include "composed/derivative.h"
#include "norm_ops.h"
#include "raw_op.h"

namespace tsmem::composed {
namespace {

using at::Tensor;

OptTensor in(at::ScalarType dtype, const OptTensor& t) {
  return t && t->defined() ? OptTensor(t->to(dtype)) : OptTensor();
}

// The variance that a norm in evaluation with eps = 0 makes this of.
Tensor variance_of(const Tensor& invstd) { return invstd.pow(-2); }

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& running_mean, const OptTensor& running_var,
                                                   const OptTensor& other, bool training, double momentum, double eps,
                                                   const Act& act, bool keep_mask) {
  const auto format = feature_format(input.dim(), is_channels_last(input));
  const auto acc = acc_type(input.scalar_type());
  const Tensor x = beside_statistics(input.contiguous(format));
  const bool same = x.scalar_type() == input.scalar_type();
  const auto beside = [&](const OptTensor& t) { return same ? t : in(acc, t); };
  const OptTensor of_mean = beside(running_mean), of_var = beside(running_var);
  auto [normed, mean, invstd] =
      at::native_batch_norm(x, beside(weight), beside(bias), of_mean, of_var, training, momentum, eps);
  normed = normed.to(input.scalar_type());
  if (training && !same)
    for (const auto& [own, moved] : {std::pair(running_mean, of_mean), std::pair(running_var, of_var)})
      if (moved && !moved->is_same(*own)) own->copy_(*moved);
  if (!training) {
    mean = running_mean->to(acc, /*non_blocking=*/false, /*copy=*/true);
    invstd = (running_var->to(acc) + eps).rsqrt();
  }
  const Tensor before = (other ? normed + *other : normed).contiguous(format);
  const Tensor bits = keep_mask ? bits_of(before, act) : at::empty({0}, input.options().dtype(at::kByte));
  return {aten_act(before, act), mean.to(acc), invstd.to(acc), bits};
}

Tensor apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
             const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& /*spare*/) {
  return norm_by_pytorch(input.contiguous(feature_format(input.dim(), is_channels_last(input))), weight, bias, mean,
                         invstd, /*training=*/false,
                         /*eps=*/0, other, act);
}

// In evaluation the input's gradient and the bias's don't depend on the input, which then may not be there.
std::tuple<Tensor, Tensor, Tensor> gradients_without_input(const Tensor& grad, const OptTensor& weight,
                                                           const Tensor& invstd, std::array<bool, 3> want) {
  const auto acc = invstd.scalar_type();
  Tensor x, bias;
  if (want[0]) {
    std::vector<int64_t> channels(grad.dim(), 1);
    channels[1] = grad.size(1);
    const Tensor scale = weight ? invstd * weight->to(acc) : invstd;
    x = (grad * scale.view(channels)).to(grad.scalar_type());
  }
  if (want[2]) {
    std::vector<int64_t> others(grad.dim() - 1, 0);
    for (int64_t d = 2; d < grad.dim(); ++d) others[d - 1] = d;
    bias = grad.sum(others, /*keepdim=*/false, acc);
  }
  return {x, Tensor(), bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const OptTensor& input,
                                                    const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                    const Tensor& invstd, const OptTensor& other, const OptTensor& mask,
                                                    bool training, bool channels_last, const Act& act,
                                                    std::array<bool, 4> want, bool /*overwrite*/) {
  const auto format = feature_format(grad_output.dim(), channels_last);
  const Tensor given = grad_output.contiguous(format);
  const OptTensor x = input ? OptTensor(input->contiguous(format)) : OptTensor();
  const Tensor grad =
      mask ? gradient_from_bits(given, *mask, act)
      : act.kind == ActKind::identity
          ? given
          : gradient_from_input(given, norm_by_pytorch(*x, weight, bias, mean, invstd, false, 0, other, {}), act);
  const std::array<bool, 3> through = {want[0], want[1], want[2]};
  std::tuple<Tensor, Tensor, Tensor> found;
  if (x && (through[0] || through[1] || through[2])) {
    const Tensor scale =
        kept_or_any(in(mean.scalar_type(), weight), weight || want[1] || want[2], mean, mean.scalar_type());
    found = at::native_batch_norm_backward(beside_statistics(grad), beside_statistics(*x), optional(scale), mean,
                                           variance_of(invstd), mean, invstd, training,
                                           /*eps=*/0, through);
  } else {
    found = gradients_without_input(grad, weight, invstd, through);
  }
  const auto& [of_input, of_weight, of_bias] = found;
  const auto acc = mean.scalar_type();
  return {want[0] ? of_input.to(grad.scalar_type()) : Tensor(), want[1] ? of_weight.to(acc) : Tensor(),
          want[2] ? of_bias.to(acc) : Tensor(), want[3] ? grad : Tensor()};
}

// What aten's group norms count.
struct Groups {
  int64_t images, channels, pixels, groups;
  Groups(const Tensor& x, int64_t of_an_image)
      : images(x.size(0)), channels(x.size(1)), pixels(x.numel() / (images * channels)), groups(of_an_image) {}
};

// PyTorch's kernels of devices want one dtype and contiguous maps.
Tensor wide(const Tensor& t) { return t.to(acc_type(t.scalar_type())).contiguous(); }

Tensor act_in_format(const Tensor& normed, const Tensor& like, const Act& act) {
  return aten_act(normed.to(like.scalar_type()).contiguous(group_format(like)), act);
}

std::tuple<Tensor, Tensor, Tensor> group_forward(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                                 int64_t groups, double eps, const Act& act) {
  const Groups of(input, groups);
  const auto acc = acc_type(input.scalar_type());
  const auto [normed, mean, invstd] = at::native_group_norm(wide(input), in(acc, weight), in(acc, bias), of.images,
                                                            of.channels, of.pixels, groups, eps);
  return {act_in_format(normed, input, act), mean.reshape({-1}), invstd.reshape({-1})};
}

// A norm in evaluation, each channel of each image one of its channels.
Tensor normed_again(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                    const Tensor& invstd) {
  const Groups of(input, mean.numel() / input.size(0));
  const auto acc = mean.scalar_type();
  const auto each = [&](const Tensor& t) { return t.repeat_interleave(of.channels / of.groups); };
  const auto all = [&](const OptTensor& t) { return t ? OptTensor(t->to(acc).repeat({of.images})) : OptTensor(); };
  const OptTensor scale = weight_beside(weight, bias);
  return at::batch_norm(wide(input).view({1, of.images * of.channels, of.pixels}), all(scale), all(bias), each(mean),
                        each(variance_of(invstd)), false, 0, /*eps=*/0, /*cudnn_enabled=*/false)
      .view(input.sizes());
}

Tensor group_apply(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                   const Tensor& invstd, const Act& act, const OptTensor& /*spare*/) {
  return act_in_format(normed_again(input, weight, bias, mean, invstd), input, act);
}

std::tuple<Tensor, Tensor, Tensor> group_backward(const Tensor& grad_output, const Tensor& input,
                                                  const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                  const Tensor& invstd, const Act& act, std::array<bool, 3> want,
                                                  bool /*overwrite*/) {
  const Groups of(input, mean.numel() / input.size(0));
  const auto acc = mean.scalar_type();
  Tensor grad = wide(grad_output);
  if (act.kind != ActKind::identity)
    grad =
        gradient_from_input(grad, wide(normed_again(input, weight, bias, mean, invstd).to(input.scalar_type())), act);
  const Tensor scale =
      kept_or_any(in(acc, weight), weight || want[1] || want[2], at::empty({of.channels}, mean.options()), acc);
  const auto [x, w, b] = at::native_group_norm_backward(grad, wide(input), mean.view({of.images, of.groups}),
                                                        invstd.view({of.images, of.groups}), optional(scale), of.images,
                                                        of.channels, of.pixels, of.groups, want);
  return {want[0] ? x.to(input.scalar_type()).contiguous(group_format(input)) : Tensor(), want[1] ? w : Tensor(),
          want[2] ? b : Tensor()};
}

}  // namespace

void register_norm(torch::Library& m, c10::DispatchKey key) {
  m.impl("_batch_norm_act_forward", key, TORCH_FN((FromSchema<&forward>::call)));
  m.impl("_batch_norm_act_apply", key, TORCH_FN((FromSchema<&apply>::call)));
  m.impl("_batch_norm_act_backward", key, TORCH_FN((FromSchema<&backward>::call)));
  m.impl("_group_norm_act_forward", key, TORCH_FN((FromSchema<&group_forward>::call)));
  m.impl("_group_norm_act_apply", key, TORCH_FN((FromSchema<&group_apply>::call)));
  m.impl("_group_norm_act_backward", key, TORCH_FN((FromSchema<&group_backward>::call)));
}

}  // namespace tsmem::composed
