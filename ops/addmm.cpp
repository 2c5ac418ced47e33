// Products of matrices in their other spellings: mm, bmm, addmm, baddbmm. Each keeps a factor only where the other
// one's gradient needs it; one that can be recomputed (recompute.h) isn't kept.
//
// Backwards as derivatives.yaml has them for these operators.
#include <ATen/autocast_mode.h>

#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Scalar;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// beta * self + alpha * (a b); without `self` there are no numbers.
struct Scales {
  Scalar beta = 1, alpha = 1;
};

// a, b: matrices, or batches of them.
Tensor affine_product(const OptTensor& self, const Tensor& a, const Tensor& b, const Scales& by, bool batches) {
  if (!self) return batches ? at::bmm(a, b) : at::mm(a, b);
  return batches ? at::baddbmm(*self, a, b, by.beta, by.alpha) : at::addmm(*self, a, b, by.beta, by.alpha);
}

Tensor times(const Tensor& t, const Scalar& factor) { return factor.equal(1) ? t : t * factor; }

struct Product : Function<Product> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const OptTensor& self,
                        const Scales& by) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(b.requires_grad() ? a : Tensor());
    keeper.add(a.requires_grad() ? b : Tensor());
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["alpha"] = by.alpha;
    data["beta"] = by.beta;
    if (self) data["self"] = self->sizes();
    data["a_by_columns"] = a.dim() == 2 && by_columns(a);
    data["b_by_columns"] = a.dim() == 2 && by_columns(b);
    return affine_product(self, a, b, by, a.dim() == 3);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(4);
    const SavedTensors kept(ctx);
    auto& data = ctx->saved_data;
    const Scalar alpha = data["alpha"].toScalar();
    std::vector<Tensor> g(4);
    if (ctx->needs_input_grad(1)) {
      if (grad.dim() == 3)
        g[1] = kept[0].transpose(1, 2).bmm(grad);
      else
        g[1] = of_second(kept, grad, data["b_by_columns"].toBool());
      g[1] = times(g[1], alpha);
    }
    if (data.count("self") && ctx->needs_input_grad(2))
      g[2] = times(grad.sum_to_size(data["self"].toIntVector()), data["beta"].toScalar());
    if (ctx->needs_input_grad(0)) {
      const Tensor b = kept[1];
      g[0] = times(data["a_by_columns"].toBool() ? b.mm(grad.t()).t() : at::matmul(grad, b.transpose(-2, -1)), alpha);
    }
    return g;
  }

  // The gradient of the second of two matrices, some rows of the first at a time.
  static Tensor of_second(const SavedTensors& kept, const Tensor& grad, bool by_columns) {
    Tensor g;
    kept.by_rows(0, [&](int64_t first, const Tensor& a) {
      const Tensor some = grad.narrow(0, first, a.size(0));
      const Tensor &left = by_columns ? some : a, &right = by_columns ? a : some;
      g = g.defined() ? g.addmm_(left.t(), right) : left.t().mm(right);
    });
    return by_columns ? g.t() : g;
  }
};

Tensor run_addmm(const OptTensor& self, const Tensor& a, const Tensor& b, const Scales& by, int64_t dims,
                 RecomputeArgument recompute) {
  const auto alike = [&](const Tensor& t) {
    return plain(t) && t.numel() > 0 && t.scalar_type() == a.scalar_type() && t.device() == a.device();
  };
  const bool ours = needs_grad(a, b, value_or_undefined(self)) && alike(a) && alike(b) && (!self || alike(*self)) &&
                    a.dim() == dims && b.dim() == dims;
  if (!ours) return affine_product(self, a, b, by, dims == 3);
  const Tensor out = Product::apply(a, b, self, by);
  const double flops = 2.0 * static_cast<double>(out.numel()) * static_cast<double>(a.size(-1));
  const LayerOffer offered = dims == 2 ? as_cheap_layer(recompute, out, a, b, value_or_undefined(self), flops)
                                       : as_cheap_product(recompute, out, a, b, value_or_undefined(self), flops);
  offer(
      out, {a, b, value_or_undefined(self)},
      [by](std::vector<Tensor>& from, const std::vector<bool>&) {
        return affine_product(optional(from[2]), from[0], from[1], by, from[0].dim() == 3);
      },
      offered.recompute, Pieces::no, offered.cost);
  return out;
}

template <int64_t dims>
Tensor multiply(const Tensor& a, const Tensor& b, int64_t recompute) {
  return run_addmm(std::nullopt, a, b, {}, dims, recompute);
}
template <int64_t dims>
Tensor multiply_add(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                    int64_t recompute) {
  return run_addmm(self, a, b, {beta, alpha}, dims, recompute);
}

template <c10::DeviceType device>
struct CastAddmm {
  const at::ScalarType low = at::autocast::get_lower_precision_fp_from_device_type(device);
  c10::impl::ExcludeDispatchKeyGuard guard{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  Tensor cast(const Tensor& t, int64_t recompute) const { return cast_for_autocast(low, t, device, recompute); }

  template <int64_t dims>
  static Tensor multiply(const Tensor& a, const Tensor& b, int64_t recompute) {
    const CastAddmm c;
    return tsmem::multiply<dims>(c.cast(a, recompute), c.cast(b, recompute), recompute);
  }
  template <int64_t dims>
  static Tensor multiply_add(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                             const Scalar& alpha, int64_t recompute) {
    const CastAddmm c;
    return tsmem::multiply_add<dims>(at::autocast::cached_cast(c.low, self, device), c.cast(a, recompute),
                                     c.cast(b, recompute), beta, alpha, recompute);
  }
};

template <c10::DeviceType device>
void register_autocast_of(torch::Library& m, c10::DispatchKey key) {
  using Cast = CastAddmm<device>;
  m.impl("mm", key, TORCH_FN(Cast::template multiply<2>));
  m.impl("bmm", key, TORCH_FN(Cast::template multiply<3>));
  m.impl("addmm", key, TORCH_FN(Cast::template multiply_add<2>));
  m.impl("baddbmm", key, TORCH_FN(Cast::template multiply_add<3>));
}

}  // namespace

void register_addmm(torch::Library& m) {
  m.def("mm(Tensor self, Tensor mat2, int recompute=0) -> Tensor", TORCH_FN(multiply<2>));
  m.def("bmm(Tensor self, Tensor mat2, int recompute=0) -> Tensor", TORCH_FN(multiply<3>));
  m.def("addmm(Tensor self, Tensor mat1, Tensor mat2, Scalar beta=1, Scalar alpha=1, int recompute=0) -> Tensor",
        TORCH_FN(multiply_add<2>));
  m.def("baddbmm(Tensor self, Tensor batch1, Tensor batch2, Scalar beta=1, Scalar alpha=1, int recompute=0) -> Tensor",
        TORCH_FN(multiply_add<3>));
  register_autocast_of<c10::DeviceType::CPU>(m, c10::DispatchKey::AutocastCPU);
  register_autocast_of<c10::DeviceType::CUDA>(m, c10::DispatchKey::AutocastCUDA);
}

}  // namespace tsmem
