// Shapes of the raw normalisation ops' results.
#include "norm_ops.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_meta(const Tensor& input, const OptTensor&, const OptTensor&,
                                                        const OptTensor&, const OptTensor&, const OptTensor&, bool,
                                                        double, double, const Act&, bool keep_mask) {
  const bool channels_last = is_channels_last(input);
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  const auto channels = input.sym_size(1);
  Tensor out = at::empty_symint(input.sym_sizes(), input.options(), feature_format(input.dim(), channels_last));
  const auto spatial = input.sym_numel() / input.sym_size(0) / channels;
  // As NormArgs::mask_bytes().
  const auto bytes = channels_last || input.dim() == 2 || spatial == 1
                         ? (input.sym_numel() + 7) / 8
                         : input.sym_size(0) * channels * ((spatial + 7) / 8);
  return {out, at::empty_symint({channels}, options), at::empty_symint({channels}, options),
          at::empty_symint({keep_mask ? bytes : c10::SymInt(0)}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor& g, const OptTensor&, const OptTensor&,
                                                         const OptTensor&, const Tensor&, const Tensor&,
                                                         const OptTensor&, const OptTensor&, bool, bool channels_last,
                                                         const Act&, std::array<bool, 4> want, bool) {
  const auto format = feature_format(g.dim(), channels_last);
  auto map = [&](bool wanted) { return wanted ? at::empty_symint(g.sym_sizes(), g.options(), format) : Tensor(); };
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint({g.sym_size(1)}, g.options().dtype(acc_type(g.scalar_type()))) : Tensor();
  };
  return {map(want[0]), vector(want[1]), vector(want[2]), map(want[3])};
}

Tensor apply_meta(const Tensor& input, const OptTensor&, const OptTensor&, const Tensor&, const Tensor&,
                  const OptTensor&, const Act&, const OptTensor&) {
  return at::empty_symint(input.sym_sizes(), input.options(), feature_format(input.dim(), is_channels_last(input)));
}

std::tuple<Tensor, Tensor, Tensor> group_forward_meta(const Tensor& input, const OptTensor&, const OptTensor&,
                                                      int64_t groups, double, const Act&) {
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  const auto statistics = input.sym_size(0) * groups;
  return {at::empty_symint(input.sym_sizes(), input.options(), group_format(input)),
          at::empty_symint({statistics}, options), at::empty_symint({statistics}, options)};
}

Tensor group_apply_meta(const Tensor& input, const OptTensor&, const OptTensor&, const Tensor&, const Tensor&,
                        const Act&, const OptTensor&) {
  return at::empty_symint(input.sym_sizes(), input.options(), group_format(input));
}

std::tuple<Tensor, Tensor, Tensor> group_backward_meta(const Tensor& grad, const Tensor& input, const OptTensor&,
                                                       const OptTensor&, const Tensor& mean, const Tensor&, const Act&,
                                                       std::array<bool, 3> want, bool) {
  auto vector = [&](bool wanted) { return wanted ? at::empty_symint({input.sym_size(1)}, mean.options()) : Tensor(); };
  return {want[0] ? at::empty_symint(grad.sym_sizes(), grad.options(), group_format(input)) : Tensor(), vector(want[1]),
          vector(want[2])};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pool_forward_meta(const Tensor& input, const OptTensor&, const OptTensor&,
                                                             const OptTensor&, const OptTensor&, bool, double, double,
                                                             const Act&, at::IntArrayRef kernel, at::IntArrayRef,
                                                             at::IntArrayRef, at::IntArrayRef, at::IntArrayRef out_size,
                                                             bool keep_positions) {
  const auto format = feature_format(4, is_channels_last(input));
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  const std::vector<c10::SymInt> sizes{input.sym_size(0), input.sym_size(1), out_size[0], out_size[1]};
  const auto kind = input.options().dtype(position_type(kernel));
  return {at::empty_symint(sizes, input.options(), format), at::empty_symint({input.sym_size(1)}, options),
          at::empty_symint({input.sym_size(1)}, options),
          keep_positions ? at::empty_symint(sizes, kind, format) : at::empty({0}, kind)};
}

std::tuple<Tensor, Tensor, Tensor> pool_backward_meta(const Tensor&, const Tensor& x, const OptTensor&,
                                                      const OptTensor&, const Tensor&, const Tensor&, const Tensor&,
                                                      bool, bool channels_last, const Act&, at::IntArrayRef,
                                                      at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                                                      std::array<bool, 3> want) {
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint({x.sym_size(1)}, x.options().dtype(acc_type(x.scalar_type()))) : Tensor();
  };
  return {want[0] ? at::empty_symint(x.sym_sizes(), x.options(), feature_format(4, channels_last)) : Tensor(),
          vector(want[1]), vector(want[2])};
}

Tensor pool_apply_meta(const Tensor& input, const OptTensor&, const OptTensor&, const Tensor&, const Tensor&,
                       const Tensor&, const Act&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                       at::IntArrayRef out_size) {
  return at::empty_symint({input.sym_size(0), input.sym_size(1), out_size[0], out_size[1]}, input.options(),
                          feature_format(4, is_channels_last(input)));
}

Tensor scale_grad_meta(const Tensor&, const Tensor& input, const OptTensor&, const OptTensor&, const OptTensor&,
                       const OptTensor&, bool last_dim, const Act&) {
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  if (last_dim) return at::empty_symint({input.sym_size(-1)}, options);
  return at::empty_symint({input.sym_size(0), input.sym_size(1)}, options);
}

}  // namespace

void register_norm_meta(torch::Library& m) {
  m.impl("_batch_norm_act_apply", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&apply_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_apply", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&pool_apply_meta>::call)));
  m.impl("_batch_norm_act_forward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&forward_meta>::call)));
  m.impl("_batch_norm_act_backward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&backward_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_forward", c10::DispatchKey::Meta,
         TORCH_FN((FromSchema<&pool_forward_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_backward", c10::DispatchKey::Meta,
         TORCH_FN((FromSchema<&pool_backward_meta>::call)));
  m.impl("_group_norm_act_forward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&group_forward_meta>::call)));
  m.impl("_group_norm_act_apply", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&group_apply_meta>::call)));
  m.impl("_group_norm_act_backward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&group_backward_meta>::call)));
  m.impl("_scale_grad", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&scale_grad_meta>::call)));
}

}  // namespace tsmem
