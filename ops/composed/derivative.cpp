#include "composed/derivative.h"

#include "act_table.h"
#include "activation.h"

namespace tsmem::composed {
namespace {

using at::Tensor;

// Compared with the bound itself, as PyTorch's kernels do: `le` and `ge` would round it to 16 bits first.
double in_16_bits(const Tensor& x, double bound) {
  const auto number = static_cast<float>(bound);
  if (x.scalar_type() == at::kHalf) return static_cast<float>(at::Half(number));
  return x.scalar_type() == at::kBFloat16 ? static_cast<float>(at::BFloat16(number)) : bound;
}
Tensor at_most(const Tensor& x, double bound) {
  const double near = in_16_bits(x, bound);
  return near > bound ? x.lt(near) : x.le(near);
}
Tensor at_least(const Tensor& x, double bound) {
  const double near = in_16_bits(x, bound);
  return near < bound ? x.gt(near) : x.ge(near);
}

// Where the derivative is the upper one of its two values: the rows' upper() in act_table.h.
Tensor upper(const Tensor& x, const Act& act) {
  switch (act.kind) {
    case ActKind::relu:
      return x.le(0).logical_not_();
    case ActKind::threshold:
      return x.le(act.a).logical_not_();
    case ActKind::hardtanh:
      return at_most(x, act.a).logical_or_(at_least(x, act.b)).logical_not_();
    case ActKind::leaky_relu:
      return x.gt(0);
    default:
      return x.gt(-3).logical_and_(x.lt(3));
  }
}

// Where the derivative is 0 whatever the arguments, an infinite gradient gives 0 too, as in PyTorch.
Tensor times_slope(const Tensor& grad, const Tensor& is_upper, const Act& act) {
  Slopes slopes;
  bool zero = false;
  with_row(act.kind, [&](auto row) {
    slopes = slopes_of<decltype(row)>(act);
    if constexpr (row.saves == ActSaves::bit) zero = !row.lower_slope;
  });
  const auto times = [&](double slope) { return slope == 1 ? grad : grad * slope; };
  return zero ? at::where(is_upper, times(slopes.on), at::zeros({}, grad.options()))
              : at::where(is_upper, times(slopes.on), times(slopes.off));
}

Tensor places(const at::TensorOptions& options) {
  return at::bitwise_left_shift(at::ones({8}, options.dtype(at::kByte)), at::arange(8, options.dtype(at::kByte)));
}

}  // namespace

Tensor bits_of(const Tensor& x, const Act& act) {
  const int64_t n = x.numel();
  const Tensor flat = upper(x, act).as_strided({n}, {1}).to(at::kByte);
  const Tensor whole = at::constant_pad_nd(flat, {0, (8 - n % 8) % 8}).view({-1, 8});
  return (whole * places(x.options())).sum(1, /*keepdim=*/false, at::kByte);
}

Tensor gradient_from_bits(const Tensor& grad, const Tensor& bits, const Act& act) {
  const Tensor flat = bits.unsqueeze(1).bitwise_and(places(grad.options())).ne(0).view({-1});
  return times_slope(grad, flat.as_strided(grad.sizes(), grad.strides()), act);
}

Tensor gradient_from_input(const Tensor& grad, const Tensor& x, const Act& act) {
  switch (info_of(act.kind).saves) {
    case ActSaves::nothing:
      return grad;
    case ActSaves::bit:
      return times_slope(grad, upper(x, act), act);
    case ActSaves::input:
      return aten_act_backward(grad, x, act, {});
    case ActSaves::output:
      const Tensor y = aten_act(x, act);
      return act.kind == ActKind::tanh ? at::tanh_backward(grad, y) : at::sigmoid_backward(grad, y);
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace tsmem::composed
