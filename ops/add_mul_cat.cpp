// Sums, products and concatenations that can be recomputed in backward.
//
// add and cat keep nothing, as PyTorch's; a product keeps the factors that the other one's gradient needs, or what they
// are made from.

#include <array>

#include "function.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool alike(const Tensor& a, const Tensor& b) {
  return plain(a) && plain(b) && a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha, int64_t recompute, int64_t in_place) {
  if (in_place == kFirst && !same_in_place(self, other)) return self.clone().add_(other, alpha);
  if (in_place == kSecond && !same_in_place(other, self)) return other.clone().add_(self);  // alpha is 1 there
  const bool is_new = makes_new(in_place);
  const Tensor a = is_new ? as_scripted(self, recompute) : self, b = is_new ? as_scripted(other, recompute) : other;
  const Tensor sum = in_place == kNewFromSecond ? at::add(b, a) : at::add(a, b, alpha);
  const Tensor out = in_target_strides(sum, self, other, in_place);
  if (needs_grad(a, b) && alike(a, b))
    offer(
        out, {a, b},
        [alpha](std::vector<Tensor>& from, const std::vector<bool>& spare) {
          return may_overwrite_first(from, spare) ? from[0].add_(from[1], alpha) : at::add(from[0], from[1], alpha);
        },
        recompute);
  return out;
}

struct Mul : Function<Mul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(b.requires_grad() ? a : Tensor());
    keeper.add(a.requires_grad() ? b : Tensor());
    keeper.save(ctx);
    ctx->saved_data["a"] = a.sizes();
    ctx->saved_data["b"] = b.sizes();
    return at::mul(a, b);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(2);
    const SavedTensors kept(ctx);
    std::vector<Tensor> g(2);
    const std::array<std::vector<int64_t>, 2> sizes = {ctx->saved_data["a"].toIntVector(),
                                                       ctx->saved_data["b"].toIntVector()};
    // A scale's gradient first: the other one may take the memory of `grad`.
    const int first = grad.sizes() == sizes[0] ? 1 : 0;
    for (int i : {first, 1 - first}) {
      if (!ctx->needs_input_grad(i)) continue;
      const Tensor other = kept[1 - i];
      std::optional<Tensor> sums;
      if (grad.sizes() != sizes[i]) sums = sum_of_product(grad, other, sizes[i]);
      if (sums)
        g[i] = *sums;
      else if (i != first && grad.sizes() == sizes[i] && only_ours(grad))
        g[i] = Tensor(grad).mul_(other);
      else
        g[i] = (grad * other).sum_to_size(sizes[i]);
    }
    return g;
  }
};

Tensor mul(const Tensor& self, const Tensor& other, int64_t recompute, int64_t in_place) {
  if (in_place == kFirst && !same_in_place(self, other)) return self.clone().mul_(other);
  if (in_place == kSecond && !same_in_place(other, self)) return other.clone().mul_(self);
  const bool is_new = makes_new(in_place);
  const Tensor a = is_new ? as_scripted(self, recompute) : self, b = is_new ? as_scripted(other, recompute) : other;
  const bool from_second = in_place == kNewFromSecond;
  const Tensor &first = from_second ? b : a, &second = from_second ? a : b;
  const bool ours = needs_grad(a, b) && alike(a, b);
  const Tensor out =
      in_target_strides(ours ? Mul::apply(first, second) : at::mul(first, second), self, other, in_place);
  if (ours) offer(out, {first, second}, multiply_again, recompute);
  return out;
}

Tensor cat(at::TensorList tensors, int64_t dim, int64_t recompute) {
  bool ours = RecomputeArgument(recompute).offered() && at::GradMode::is_enabled() && !tensors.empty() &&
              tensors[0].dim() > 0,
       grad = false;
  for (const Tensor& t : tensors) {
    ours = ours && alike(t, tensors[0]) && t.dim() == tensors[0].dim();
    grad = grad || t.requires_grad();
  }
  if (!ours || !grad) return at::cat(tensors, dim);
  const Tensor out = at::cat(tensors, dim);
  // Of more pieces a user by pieces would read its other operand too often.
  const bool by_columns = tensors.size() <= 4 && out.dim() > 1 && at::maybe_wrap_dim(dim, out.dim()) == out.dim() - 1;
  offer(
      out, tensors.vec(), [dim](std::vector<Tensor>& from, const std::vector<bool>&) { return at::cat(from, dim); },
      recompute, Pieces::yes, {}, Rows::all, by_columns ? Form::columns : Form::any);
  return out;
}

}  // namespace

void register_add_mul_cat(torch::Library& m) {
  m.def("add(Tensor self, Tensor other, Scalar alpha=1, int recompute=0, int in_place=0) -> Tensor", TORCH_FN(add));
  m.def("mul(Tensor self, Tensor other, int recompute=0, int in_place=0) -> Tensor", TORCH_FN(mul));
  m.def("cat(Tensor[] tensors, int dim=0, int recompute=0) -> Tensor", TORCH_FN(cat));
}

}  // namespace tsmem
