#include "composed/derivative.h"

#include "act_table.h"
#include "activation.h"

namespace tsmem::composed {
namespace {

using at::Tensor;

// Where the derivative is the upper one of its two values: the rows' upper() in act_table.h.
Tensor upper(const Tensor& x, const Act& act) {
  switch (act.kind) {
    case ActKind::relu:
      return x.le(0).logical_not_();
    case ActKind::threshold:
      return x.le(act.a).logical_not_();
    case ActKind::hardtanh:
      return x.le(act.a).logical_or_(x.ge(act.b)).logical_not_();
    case ActKind::leaky_relu:
      return x.gt(0);
    default:
      return x.gt(-3).logical_and_(x.lt(3));
  }
}

// A gradient that is infinite where the derivative is 0 gives 0, as in PyTorch.
Tensor times_slope(const Tensor& grad, const Tensor& is_upper, const Act& act) {
  Slopes slopes;
  with_row(act.kind, [&](auto row) { slopes = slopes_of<decltype(row)>(act); });
  const auto times = [&](double slope) { return slope == 1 ? grad : grad * slope; };
  return slopes.off == 0 ? at::where(is_upper, times(slopes.on), at::zeros({}, grad.options()))
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
