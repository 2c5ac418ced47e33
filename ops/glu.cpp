// glu: keeps its input, as PyTorch's, or what that is made from; its output can be recomputed.
#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Glu : Function<Glu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(x);
    keeper.save(ctx);
    ctx->saved_data["dim"] = dim;
    return at::glu(x, dim);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    const SavedTensors kept(ctx);
    std::vector<Tensor> g{at::glu_backward(grads[0], kept[0], ctx->saved_data["dim"].toInt())};
    return {g[0], Tensor()};
  }
};

Tensor run_glu(const Tensor& self, int64_t dim, int64_t recompute) {
  if (!needs_grad(self) || !plain(self) || self.numel() == 0) return at::glu(self, dim);
  const Tensor out = Glu::apply(self, dim);
  offer(
      out, {self}, [dim](std::vector<Tensor>& from, const std::vector<bool>&) { return at::glu(from[0], dim); },
      recompute);
  return out;
}

}  // namespace

void register_glu(torch::Library& m) {
  m.def("glu(Tensor self, int dim=-1, int recompute=0) -> Tensor", TORCH_FN(run_glu));
}

}  // namespace tsmem
