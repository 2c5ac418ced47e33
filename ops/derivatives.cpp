// Formulas as torch's derivatives.yaml and FunctionsManual.cpp have them, of differentiable operators.
#include "derivatives.h"

#include <cmath>
#include <limits>

#include "torch_version.h"

namespace tsmem {
namespace {

using at::Tensor;
using Call = const BackwardCall&;
using Arguments = std::vector<at::IValue>;

constexpr unsigned kFirst = 1, kSecond = 2, kThird = 4;

Tensor pow_number(Call c) {
  const at::Scalar exponent = c.number(1);
  if (exponent.equal(0.0)) return at::zeros_like(c.grad);
  const at::Scalar less =
      exponent.isIntegral(false) ? at::Scalar(exponent.toLong() - 1) : at::Scalar(exponent.toDouble() - 1);
  return c.grad * (c[0].pow(less) * exponent);
}

Tensor pow_base(Call c) {
  return at::where(c[1] == 0.0, at::zeros({}, c.grad.options()), c.grad * (c[1] * c[0].pow(c[1] - 1)));
}

// At a base of 0 the power is 0 for positive exponents, and so is its derivative.
Tensor pow_exponent(Call c) {
  const Tensor result = c.result(), product = result * c[0].to(result.scalar_type()).log();
  return c.grad * at::where(at::logical_and(c[0] == 0, c[1] >= 0), at::zeros({}, product.options()), product);
}

Tensor pow_exponent_of_number(Call c) {
  const double base = c.number(0).toDouble();
  const Tensor product = c.grad * (c.result() * std::log(base));
  return base == 0 ? at::where(c[0] >= 0, at::zeros({}, c.grad.options()), product) : product;
}

Tensor clamped(Call c, size_t min, size_t max) {
  Tensor inside;
  if (min && !c.arguments[min].isNone()) inside = kClampPassesAtBound ? c[0] >= c.number(min) : c[0] > c.number(min);
  if (max && !c.arguments[max].isNone()) {
    const Tensor below = kClampPassesAtBound ? c[0] <= c.number(max) : c[0] < c.number(max);
    inside = inside.defined() ? inside.logical_and_(below) : below;
  }
  return inside.defined() ? at::where(inside, c.grad, at::zeros({}, c.grad.options())) : c.grad;
}

// The gradient of the one that is chosen; equal ones share it.
template <bool larger>
Tensor chosen(Call c, const Tensor& x, const Tensor& other) {
  const Tensor taken = at::where(x == other, c.grad / 2, c.grad);
  return at::masked_fill(taken, larger ? x < other : x > other, 0);
}

template <bool larger>
std::vector<OperandDerivative> chosen_of_two() {
  return {{kFirst | kSecond, [](Call c) { return chosen<larger>(c, c[0], c[1]); }},
          {kFirst | kSecond, [](Call c) { return chosen<larger>(c, c[1], c[0]); }}};
}

// A reduced tensor with its dimensions of size 1 again.
Tensor unreduced(const Tensor& t, const at::IValue& dims, bool keepdim, int64_t dim) {
  if (keepdim || dims.isNone() || dim == 0) return t;
  std::vector<int64_t> list = dims.toIntVector();
  if (list.empty()) return t;
  for (int64_t& d : list) d = d < 0 ? d + dim : d;
  std::sort(list.begin(), list.end());
  Tensor wide = t;
  for (const int64_t d : list) wide = wide.unsqueeze(d);
  return wide;
}

int64_t reduced_numel(at::IntArrayRef sizes, const at::IValue& dims) {
  std::vector<int64_t> list = dims.isNone() ? std::vector<int64_t>() : dims.toIntVector();
  int64_t numel = 1;
  if (sizes.empty()) return numel;  // its dimensions may be named 0 and -1
  if (list.empty())
    for (const int64_t s : sizes) numel *= s;
  for (const int64_t d : list) numel *= sizes[d < 0 ? d + static_cast<int64_t>(sizes.size()) : d];
  return numel;
}

// var.dim has `unbiased`, var.correction the number.
Tensor variance(Call c, const Tensor& grad) {
  const at::IValue &dims = c.arguments[1], &given = c.arguments[2];
  const double correction = given.isBool()   ? (given.toBool() ? 1 : 0)
                            : given.isNone() ? 1
                                             : given.toScalar().toDouble();
  const auto dim = static_cast<int64_t>(c.sizes.size());
  const double free = static_cast<double>(reduced_numel(c.sizes, dims)) - correction;
  const bool all = dims.isNone() || dims.toIntVector().empty();
  const Tensor mean = all ? c[0].mean() : c[0].mean(dims.toIntVector(), true);
  if (free <= 0 && (dims.isNone() || dim == 0)) {  // infinity times the deviation
    constexpr double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    return grad * at::where(c[0] == mean, nan, infinity);
  }
  return (2.0 / free) * unreduced(grad, dims, c.arguments[3].toBool(), dim) * (c[0] - mean);
}

Tensor deviation(Call c) { return variance(c, (c.grad / (c.result() * 2)).masked_fill(c.result() == 0, 0)); }

// The largest or smallest elements of amax and amin, which share the gradient.
Tensor extremes(Call c) {
  const auto dim = static_cast<int64_t>(c.sizes.size());
  const at::IValue& dims = c.arguments[1];
  const bool keepdim = c.arguments[2].toBool(), all = dim == 0 || dims.toIntVector().empty();
  const Tensor taken = unreduced(c.result(), dims, keepdim, dim) == c[0];
  return unreduced(c.grad, dims, keepdim, dim) * taken / (all ? taken.sum() : taken.sum(dims.toIntVector(), true));
}

// The two-norm, 0 where it is 0. By the gradient last, as PyTorch's: the quotient of a small one and the norm may be 0
// in half precision.
Tensor norm(Call c, size_t dims) {
  const auto dim = static_cast<int64_t>(c.sizes.size());
  const bool keepdim = c.arguments[dims + 1].toBool();
  const Tensor result = unreduced(c.result(), c.arguments[dims], keepdim, dim);
  const Tensor grad = unreduced(c.grad, c.arguments[dims], keepdim, dim);
  return grad * (c[0] / result.masked_fill(result == 0, std::numeric_limits<double>::infinity()));
}

bool two_norm(const Arguments& a) { return a[1].isNone() || a[1].toScalar().toDouble() == 2; }
bool two_norm_of_its_dtype(const Arguments& a) { return two_norm(a) && a[4].isNone(); }
bool real_number(const Arguments& a) { return !a[1].toScalar().isComplex(); }
bool real_base(const Arguments& a) { return !a[0].toScalar().isComplex(); }
bool some_bound(const Arguments& a) { return !(a[1].isNone() && a[2].isNone()); }

// sin(pi x) / (pi x), whose slope at 0 is 0.
Tensor sinc_gradient(Call c) {
  const Tensor by_pi = c[0] * M_PI, square = c[0] * c[0] * M_PI;
  return at::where(square == 0.0, at::zeros({}, c.grad.options()),
                   c.grad * ((by_pi * by_pi.cos() - by_pi.sin()) / square));
}

// The reciprocal of the square of a point's distance from the origin; 0 at the origin, as PyTorch has it.
Tensor by_square_of_distance(Call c) {
  const Tensor square = c[0] * c[0] + c[1] * c[1];
  return square.reciprocal().masked_fill(square == 0, 0);
}

std::vector<Tensor> sampled_gradients(Call c, const std::vector<bool>& wanted) {
  const auto backward = c[0].dim() == 5 ? at::grid_sampler_3d_backward : at::grid_sampler_2d_backward;
  auto [input, grid] = backward(c.grad, c[0], c[1], c.arguments[2].toInt(), c.arguments[3].toInt(),
                                c.arguments[4].toBool(), {wanted[0], wanted[1]});
  return {input, wanted[1] ? grid : Tensor()};
}

const std::vector<Derivative>& derivatives() {
  static const std::vector<Derivative> all = {
      {"abs", {{kFirst, [](Call c) { return c.grad * c[0].sgn(); }}}},
      {"sqrt", {{kResult, [](Call c) { return c.grad / (2 * c.result()); }}}},
      {"rsqrt", {{kResult, [](Call c) { return -0.5 * c.grad * c.result().pow(3); }}}},
      {"square", {{kFirst, [](Call c) { return c.grad * (c[0] * 2); }}}},
      {"reciprocal", {{kResult, [](Call c) { return -c.grad * (c.result() * c.result()); }}}},
      {"exp", {{kResult, [](Call c) { return c.grad * c.result(); }}}},
      {"exp2", {{kResult, [](Call c) { return c.grad * c.result() * M_LN2; }}}},
      {"expm1", {{kResult, [](Call c) { return c.grad * (c.result() + 1); }}}},
      {"log", {{kFirst, [](Call c) { return c.grad / c[0]; }}}},
      {"log2", {{kFirst, [](Call c) { return c.grad / (c[0] * M_LN2); }}}},
      {"log10", {{kFirst, [](Call c) { return c.grad / (c[0] * M_LN10); }}}},
      {"log1p", {{kFirst, [](Call c) { return c.grad / (c[0] + 1); }}}},
      {"sin", {{kFirst, [](Call c) { return c.grad * c[0].cos(); }}}},
      {"cos", {{kFirst, [](Call c) { return c.grad * -c[0].sin(); }}}},
      {"atan", {{kFirst, [](Call c) { return c.grad / (c[0] * c[0] + 1); }}}},
      {"erf", {{kFirst, [](Call c) { return M_2_SQRTPI * (-(c[0] * c[0])).exp() * c.grad; }}}},
      {"erfc", {{kFirst, [](Call c) { return -M_2_SQRTPI * (-(c[0] * c[0])).exp() * c.grad; }}}},
      {"tan", {{kResult, [](Call c) { return c.grad * (c.result() * c.result() + 1); }}}},
      {"sinh", {{kFirst, [](Call c) { return c.grad * c[0].cosh(); }}}},
      {"cosh", {{kFirst, [](Call c) { return c.grad * c[0].sinh(); }}}},
      {"sigmoid", {{kResult, [](Call c) { return at::sigmoid_backward(c.grad, c.result()); }}}},
      {"tanh", {{kResult, [](Call c) { return at::tanh_backward(c.grad, c.result()); }}}},
      {"nan_to_num", {{kFirst, [](Call c) { return c.grad * c[0].isfinite(); }}}},
      {"div.Tensor",
       {{kSecond, [](Call c) { return c.grad / c[1]; }},
        {kFirst | kSecond, [](Call c) { return -c.grad * ((c[0] / c[1]) / c[1]); }}}},
      {"pow.Tensor_Scalar", {{kFirst, pow_number}}, real_number},
      {"pow.Tensor_Tensor", {{kFirst | kSecond, pow_base}, {kFirst | kSecond | kResult, pow_exponent}}},
      {"pow.Scalar", {{kFirst | kResult, pow_exponent_of_number}}, real_base},
      {"clamp", {{kFirst, [](Call c) { return clamped(c, 1, 2); }}}, some_bound},
      {"clamp_min", {{kFirst, [](Call c) { return clamped(c, 1, 0); }}}},
      {"clamp_max", {{kFirst, [](Call c) { return clamped(c, 0, 1); }}}},
      {"minimum", chosen_of_two<false>()},
      {"min.other", chosen_of_two<false>()},
      {"maximum", chosen_of_two<true>()},
      {"max.other", chosen_of_two<true>()},
      {"addcmul",
       {{0, [](Call c) { return c.grad; }},
        {kThird, [](Call c) { return c.grad * (c[2] * c.number(3)); }},
        {kSecond, [](Call c) { return c.grad * (c[1] * c.number(3)); }}}},
      {"addcdiv",
       {{0, [](Call c) { return c.grad; }},
        {kThird, [](Call c) { return c.grad * (c.number(3) / c[2]); }},
        {kSecond | kThird, [](Call c) { return -c.grad * (c.number(3) * c[1] / (c[2] * c[2])); }}}},
      {"lerp.Tensor",
       {{kThird, [](Call c) { return c.grad * (1 - c[2]); }},
        {kThird, [](Call c) { return c.grad * c[2]; }},
        {kFirst | kSecond, [](Call c) { return c.grad * (c[1] - c[0]); }}}},
      {"sinc", {{kFirst, sinc_gradient}}},
      {"atan2",
       {{kFirst | kSecond, [](Call c) { return c.grad * c[1] * by_square_of_distance(c); }},
        {kFirst | kSecond, [](Call c) { return c.grad * -c[0] * by_square_of_distance(c); }}}},
      {"hypot",
       {{kFirst | kResult, [](Call c) { return c.grad * c[0] / c.result(); }},
        {kSecond | kResult, [](Call c) { return c.grad * c[1] / c.result(); }}}},
      {"logaddexp",
       {{kFirst | kSecond, [](Call c) { return c.grad / (1 + (c[1] - c[0]).exp()); }},
        {kFirst | kSecond, [](Call c) { return c.grad / (1 + (c[0] - c[1]).exp()); }}}},
      {"logaddexp2",
       {{kFirst | kSecond, [](Call c) { return c.grad / (1 + at::pow(2, c[1] - c[0])); }},
        {kFirst | kSecond, [](Call c) { return c.grad / (1 + at::pow(2, c[0] - c[1])); }}}},
      {"hardshrink", {{kFirst, [](Call c) { return at::hardshrink_backward(c.grad, c[0], c.number(1)); }}}},
      {"softshrink", {{kFirst, [](Call c) { return at::softshrink_backward(c.grad, c[0], c.number(1)); }}}},
      // PyTorch keeps the exponential of -|x| too, on the CPU.
      {"log_sigmoid",
       {{kFirst,
         [](Call c) { return at::log_sigmoid_backward(c.grad, c[0], std::get<1>(at::log_sigmoid_forward(c[0]))); }}}},
      {"grid_sampler", {{kFirst | kSecond}, {kFirst | kSecond}}, nullptr, sampled_gradients},
      {"amax", {{kFirst | kResult, extremes}}},
      {"amin", {{kFirst | kResult, extremes}}},
      {"var.dim", {{kFirst, [](Call c) { return variance(c, c.grad); }}}},
      {"var.correction", {{kFirst, [](Call c) { return variance(c, c.grad); }}}},
      {"std.dim", {{kFirst | kResult, deviation}}},
      {"std.correction", {{kFirst | kResult, deviation}}},
      {"norm.ScalarOpt_dim", {{kFirst | kResult, [](Call c) { return norm(c, 2); }}}, two_norm},
      {"linalg_vector_norm", {{kFirst | kResult, [](Call c) { return norm(c, 2); }}}, two_norm_of_its_dtype},
  };
  return all;
}

}  // namespace

const Derivative* derivative_of(std::string_view op) {
  for (const Derivative& d : derivatives())
    if (d.op == op) return &d;
  return nullptr;
}

}  // namespace tsmem
