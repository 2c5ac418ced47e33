// activated * scale, where activated = act(input) or act(batch_norm(input)): squeeze-excite, layer scale.
//
// The product's own backward would keep `activated`. Here the scale's gradient recomputes it, chunk by chunk, from the
// activation's input, which the activation keeps anyway. Kept: the scale, if `activated` needs a gradient; the input,
// if the scale needs one.

#include "function.h"
#include "norm_ops.h"
#include "raw_op.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ScaleGradOp =
    RawOp<Tensor(const Tensor& grad, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                 const OptTensor& mean, const OptTensor& invstd, bool last_dim, const Act& act)>;

const ScaleGradOp& scale_grad_op() {
  static const ScaleGradOp op("tsmem::_scale_grad");
  return op;
}

// What `activated` is recomputed from; no mean: it is act(input).
struct MulSource {
  Tensor input;
  OptTensor weight, bias, mean, invstd;
};

// The sum of grad * activated over what `scale_sizes` broadcasts, in one pass; nothing for an unusual broadcast.
std::optional<Tensor> fused_scale_grad(const Tensor& grad, const MulSource& s, at::IntArrayRef scale_sizes,
                                       const Act& act) {
  const int64_t dims = grad.dim(), lead = dims - static_cast<int64_t>(scale_sizes.size());
  const auto scale_size = [&](int64_t d) { return d < lead ? 1 : scale_sizes[d - lead]; };
  bool per_channel = dims >= 3, last_dim = dims >= 2 && !s.mean && scale_size(dims - 1) == grad.size(-1);
  for (int64_t d = 2; d < dims; ++d) per_channel = per_channel && scale_size(d) == 1;
  for (int64_t d = 0; d < dims - 1; ++d) last_dim = last_dim && scale_size(d) == 1;
  last_dim = last_dim && s.input.is_contiguous();
  if (!per_channel && !last_dim) return std::nullopt;
  Tensor sums;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    sums = scale_grad_op()(grad, s.input, s.weight, s.bias, s.mean, s.invstd, !per_channel, act);
  }
  if (!per_channel) return sums.view(scale_sizes);
  std::vector<int64_t> sizes(dims, 1);
  sizes[0] = grad.size(0), sizes[1] = grad.size(1);
  return sums.view(sizes).sum_to_size(scale_sizes);
}

// `activated`, detached, in acc_type.
Tensor activated_again(const MulSource& s, const Act& act) {
  at::NoGradGuard no_grad;
  const auto acc = acc_type(s.input.scalar_type());
  Tensor pre = s.input.to(acc);
  if (s.mean) {
    std::vector<int64_t> sizes(pre.dim(), 1);
    sizes[1] = pre.size(1);
    const auto vector = [&](const Tensor& t) { return t.to(acc).view(sizes); };
    pre = (pre - vector(*s.mean)) * vector(*s.invstd);
    if (s.weight) pre = pre * vector(*s.weight);
    if (s.bias) pre = pre + vector(*s.bias);
  }
  return aten_act(pre, act);
}

Tensor scale_grad(const Tensor& grad, const MulSource& s, at::IntArrayRef scale_sizes, const Act& act) {
  if (auto sums = fused_scale_grad(grad, s, scale_sizes, act)) return *sums;
  // An unusual broadcast: by PyTorch's ops.
  const Tensor activated = activated_again(s, act);
  return (activated * grad.to(activated.scalar_type())).sum_to_size(scale_sizes);
}

struct MulAct : Function<MulAct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& activated, const Tensor& scale, const Tensor& input,
                        const OptTensor& weight, const OptTensor& bias, const OptTensor& mean, const OptTensor& invstd,
                        const Act& act, bool from_second) {
    ctx->set_materialize_grads(false);
    const bool want_activated = activated.requires_grad(), want_scale = scale.requires_grad();
    const auto source = [&](const OptTensor& t) { return want_scale ? value_or_undefined(t) : Tensor(); };
    Keeper keeper;
    keeper.add(want_activated ? scale : Tensor());
    keeper.add(source(input));
    for (const OptTensor* t : {&weight, &bias, &mean, &invstd}) keeper.add(source(*t), /*always_itself=*/true);
    keeper.add_copy(Tensor(), activated);
    keeper.save(ctx);
    ctx->saved_data["scale_sizes"] = scale.sizes();
    save_act(ctx, act);
    return from_second ? at::mul(scale, activated) : at::mul(activated, scale);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(9);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    auto& data = ctx->saved_data;
    const SavedTensors kept(ctx);
    if (ctx->needs_input_grad(1)) {
      const Act act = saved_act(ctx);
      const auto sizes = data["scale_sizes"].toIntVector();
      const MulSource source{kept[1], optional(kept[2]), optional(kept[3]), optional(kept[4]), optional(kept[5])};
      result[1] =
          at::GradMode::is_enabled()
              ? (kept.in_graph(6, activated_again(source, act)).to(grad.scalar_type()) * grad).sum_to_size(sizes)
              : scale_grad(grad, source, sizes, act).to(grad.scalar_type());
    }
    if (ctx->needs_input_grad(0)) result[0] = only_ours(grad) ? Tensor(grad).mul_(kept[0]) : at::mul(grad, kept[0]);
    return result;
  }
};

Tensor run_mul_act(const Tensor& activated, const Tensor& scale, const MulSource& s, const Act& act,
                   RecomputeArgument recompute, int64_t in_place) {
  const bool from_second = in_place == kSecond || in_place == kNewFromSecond;
  const auto product = [from_second](const Tensor& a, const Tensor& b) {
    return from_second ? at::mul(b, a) : at::mul(a, b);
  };
  if (makes_new(in_place) && scripted_autocast(activated.device().type()))
    return product(as_scripted(activated), as_scripted(scale));
  if (in_place == kFirst && !same_in_place(activated, scale)) return activated.clone().mul_(scale);
  if (in_place == kSecond && !same_in_place(scale, activated)) return scale.clone().mul_(activated);
  bool usable = needs_grad(activated, scale) && plain(activated) && plain(scale) && plain(s.input) &&
                has_kernel(scale_grad_op().handle(), activated) && scale.scalar_type() == activated.scalar_type() &&
                s.input.scalar_type() == activated.scalar_type() && s.input.sizes() == activated.sizes() &&
                scale.device() == activated.device() && s.input.device() == activated.device() &&
                scale.dim() <= activated.dim() && activated.numel() > 0 && !s.input.is_same(activated);
  for (int64_t d = 1; usable && d <= scale.dim(); ++d)
    usable = scale.size(-d) == 1 || scale.size(-d) == activated.size(-d);
  if (usable && s.mean) {
    usable = activated.dim() >= 2 && s.invstd;
    for (const OptTensor* t : {&s.weight, &s.bias, &s.mean, &s.invstd})
      usable =
          usable &&
          (!*t || ((*t)->dim() == 1 && (*t)->numel() == activated.size(1) && (*t)->device() == activated.device()));
  }
  if (!usable) return in_target_strides(product(activated, scale), activated, scale, in_place);
  const Tensor made = MulAct::apply(activated, scale, s.input, s.weight, s.bias, s.mean, s.invstd, act, from_second);
  const Tensor out = in_target_strides(made, activated, scale, in_place);
  offer(out, from_second ? std::vector<Tensor>{scale, activated} : std::vector<Tensor>{activated, scale},
        multiply_again, recompute);
  return out;
}

Tensor mul_act(const Tensor& activated, const Tensor& scale, const Tensor& input, c10::string_view name,
               at::ArrayRef<double> args, int64_t recompute, int64_t in_place) {
  return run_mul_act(activated, scale, {input, {}, {}, {}, {}}, parse_act(name, args), recompute, in_place);
}

Tensor mul_batch_norm_act(const Tensor& activated, const Tensor& scale, const Tensor& input, const OptTensor& weight,
                          const OptTensor& bias, const Tensor& mean, const Tensor& invstd, c10::string_view name,
                          at::ArrayRef<double> args, int64_t recompute, int64_t in_place) {
  return run_mul_act(activated, scale, {input, weight, bias, mean, invstd}, parse_act(name, args), recompute, in_place);
}

}  // namespace

std::optional<Tensor> sum_of_product(const Tensor& grad, const Tensor& x, at::IntArrayRef sizes) {
  const auto format = x.suggest_memory_format();
  if (at::GradMode::is_enabled() || !plain(x) || !plain(grad) || !has_kernel(scale_grad_op().handle(), x) ||
      x.scalar_type() != grad.scalar_type() || x.device() != grad.device() || x.sizes() != grad.sizes() ||
      x.numel() == 0 || !x.is_contiguous(format) || !grad.is_contiguous(format))
    return std::nullopt;
  auto sums = fused_scale_grad(grad, {x, {}, {}, {}, {}}, sizes, Act{ActKind::identity});
  if (sums) sums = sums->to(grad.scalar_type());
  return sums;
}

void register_mul_act(torch::Library& m) {
  m.def(
      "mul_act(Tensor activated, Tensor scale, Tensor input, str act, float[] act_args, int recompute=0, "
      "int in_place=0) -> Tensor",
      TORCH_FN(mul_act));
  m.def(
      "mul_batch_norm_act(Tensor activated, Tensor scale, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor invstd, "
      "str act, float[] act_args, int recompute=0, int in_place=0) -> Tensor",
      TORCH_FN(mul_batch_norm_act));
}

}  // namespace tsmem
