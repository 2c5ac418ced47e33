// rrelu: in training the slope below 0 is drawn for each element. Kept: the generator's state and a bit an element,
// which tells where a slope was drawn; backward draws them again. PyTorch's keeps the slopes and the input. In
// evaluation it is a leaky ReLU, as PyTorch's. Source: ATen/native/Activation.cpp, rrelu_with_noise.
#include <cmath>

#include "activation.h"
#include "function.h"
#include "generator.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the slopes are drawn again from, but for bits and state.
struct Drawn {
  double lower, upper;
  std::vector<int64_t> sizes, strides;
};

// Each element's factor. The draw depends on nothing of the input but on where it is above 0, so that what is
// recomputed may be off by a rounding error and yet gets the same slopes.
Tensor slopes_again(const Tensor& bits, const Tensor& state, const Drawn& s, const at::TensorOptions& options) {
  const Tensor signs = unpack_positive(bits, s.sizes, s.strides, options);
  Tensor slopes = at::empty(s.sizes, options);
  at::rrelu_with_noise(signs, slopes, s.lower, s.upper, true, generator_at(state, options.device()));
  return slopes;
}

struct Rrelu : Function<Rrelu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double lower, double upper,
                        std::array<Tensor, 2>* used) {
    ctx->set_materialize_grads(false);
    Tensor out;
    const Tensor state = draw_by_copy(x, [&](const at::Generator& own) {
      Tensor slopes = at::empty_like(x, at::MemoryFormat::Contiguous);
      out = at::rrelu_with_noise(x, slopes, lower, upper, true, own);
    });
    *used = {pack_positive(x), state};
    ctx->save_for_backward({(*used)[0], (*used)[1]});
    auto& data = ctx->saved_data;
    data["lower"] = lower;
    data["upper"] = upper;
    data["sizes"] = x.sizes();
    data["strides"] = x.strides();
    return out;
  }

  // Linear in the gradient, of ATen calls: second derivatives work.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(4);
    auto& data = ctx->saved_data;
    const auto kept = ctx->get_saved_variables();
    Tensor slopes;
    {
      at::NoGradGuard no_grad;
      slopes = slopes_again(kept[0], kept[1],
                            {data["lower"].toDouble(), data["upper"].toDouble(), data["sizes"].toIntVector(),
                             data["strides"].toIntVector()},
                            grad.options());
    }
    return {grad * slopes, Tensor(), Tensor(), Tensor()};
  }
};

Tensor run_rrelu(const Tensor& self, const at::Scalar& lower, const at::Scalar& upper, bool training, int64_t recompute,
                 const c10::List<int64_t>&) {
  static const auto packer = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_act_mask", "");
  const double a = lower.toDouble(), b = upper.toDouble();
  const bool range = std::isfinite(a) && std::isfinite(b) && a <= b;  // else PyTorch raises
  const bool ours = range && needs_grad(self) && plain(self) && self.numel() > 0 && has_kernel(packer, self);
  // PyTorch's result is contiguous too.
  if (!training && ours) return act(self.contiguous(), "leaky_relu", {(a + b) / 2}, recompute, false);
  // Of close slopes PyTorch's backward takes the mean.
  if (!ours || !(b - a > 1e-6) || !draws_again(self) || !self.is_non_overlapping_and_dense())
    return at::rrelu(self, lower, upper, training);
  std::array<Tensor, 2> used;
  const Tensor out = Rrelu::apply(self, a, b, &used);
  offer(
      out, {self, used[0], used[1]},
      [s = Drawn{a, b, self.sizes().vec(), self.strides().vec()}](std::vector<Tensor>& from, const std::vector<bool>&) {
        return slopes_again(from[1], from[2], s, from[0].options()).mul_(from[0]);
      },
      recompute);
  return out;
}

}  // namespace

void register_rrelu(torch::Library& m) {
  // `draw`: as of dropout.
  m.def("rrelu(Tensor self, Scalar lower, Scalar upper, bool training, int recompute, int[](a!) draw) -> Tensor",
        TORCH_FN(run_rrelu));
}

}  // namespace tsmem
