// Products of groups of rows with a matrix each (torch.nn.functional.grouped_mm: a mixture of experts). Each factor is
// kept only where the other one's gradient needs it; one that can be recomputed (recompute.h) isn't kept.
//
// Backward as PyTorch's FunctionsManual.cpp has it (_grouped_mm_mat1_backward and _grouped_mm_mat2_backward).
#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor grouped_product(const Tensor& a, const Tensor& b, const OptTensor& ends) { return at::_grouped_mm(a, b, ends); }

Tensor transposed(const Tensor& t) { return t.transpose(-2, -1); }

struct Grouped : Function<Grouped> {
  // ends: the row, column or inner dimension after each group's last; int32.
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const OptTensor& ends) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(b.requires_grad() ? a : Tensor());
    keeper.add(a.requires_grad() ? b : Tensor());
    keeper.add(value_or_undefined(ends), true);
    keeper.save(ctx);
    ctx->saved_data["a_by_columns"] = by_columns(a);
    ctx->saved_data["b_by_columns"] = by_columns(b);
    return grouped_product(a, b, ends);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(3);
    const SavedTensors kept(ctx);
    const OptTensor ends = optional(kept[2]);
    std::vector<Tensor> g(3);
    if (ctx->needs_input_grad(1)) {
      const Tensor a = kept[0];
      g[1] = ctx->saved_data["b_by_columns"].toBool() ? transposed(grouped_product(transposed(grad), a, ends))
                                                      : grouped_product(transposed(a), grad, ends);
    }
    if (ctx->needs_input_grad(0)) {
      const Tensor b = kept[1];
      g[0] = ctx->saved_data["a_by_columns"].toBool() ? transposed(grouped_product(b, transposed(grad), ends))
                                                      : grouped_product(grad, transposed(b), ends);
    }
    return g;
  }
};

Tensor grouped_mm(const Tensor& self, const Tensor& mat2, const OptTensor& offs, const OptTensor& bias,
                  std::optional<at::ScalarType> out_dtype, int64_t recompute) {
  const OptTensor ends = defined(offs);
  const bool ours = needs_grad(self, mat2) && plain(self) && plain(mat2) && !defined(bias) &&
                    (!out_dtype || *out_dtype == self.scalar_type()) && self.dim() >= 2 && mat2.dim() >= 2;
  if (!ours) return at::_grouped_mm(self, mat2, offs, bias, out_dtype);
  const Tensor out = Grouped::apply(self, mat2, ends);
  const double flops = 2.0 * static_cast<double>(out.numel()) * static_cast<double>(self.size(-1));
  offer(out, {self, mat2, value_or_undefined(ends)},
        [](std::vector<Tensor>& from, const std::vector<bool>&) {
          return grouped_product(from[0], from[1], optional(from[2]));
        },
        recompute, Pieces::no, {flops, true});
  return out;
}

}  // namespace

void register_grouped_mm(torch::Library& m) {
  m.def(
      "_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None, "
      "int recompute=0) -> Tensor",
      TORCH_FN(grouped_mm));
}

}  // namespace tsmem
