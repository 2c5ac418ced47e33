// linear, whose backward needs the input for the weight's gradient alone, and the weight for the input's alone: what is
// not needed is not kept, and an input that can be recomputed (recompute.h) isn't either.
//
// Forward is aten::linear on all rows at once. Backward as derivatives.yaml has it for aten::addmm: matrix products
// over all leading dimensions.
#include <ATen/autocast_mode.h>

#include "linear.h"

#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {

at::Tensor linear_of_rows(const at::Tensor& input, const at::Tensor& weight, const OptTensor& bias) {
  if (input.dim() == 2) return at::linear(input, weight, bias);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::linear(input.reshape({-1, input.size(-1)}), weight, bias).view(sizes);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The weight's gradient where the kept input is columns that are put together: each piece gives some of its columns, so
// that the whole input is never there. Undefined where it is no such input, or is held.
Tensor weight_gradient_by_columns(const SavedTensors& kept, const Tensor& grad) {
  if (!plain(grad)) return {};
  const std::vector<Tensor> pieces = kept.operands_of(0, Form::columns);
  if (pieces.empty()) return {};
  int64_t columns = 0;
  for (const Tensor& p : pieces) columns += p.size(-1);
  Tensor made = at::empty({grad.size(1), columns}, grad.options());
  int64_t first = 0;
  for (const Tensor& p : pieces) {
    Tensor some = made.narrow(1, first, p.size(-1));
    at::mm_out(some, grad.t(), p.reshape({grad.size(0), p.size(-1)}));
    first += p.size(-1);
  }
  return made;
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight, const OptTensor& bias) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(weight.requires_grad() ? input : Tensor());
    keeper.add(input.requires_grad() ? weight : Tensor());
    keeper.save(ctx);
    ctx->saved_data["bias"] = bias.has_value();
    at::AutoDispatchBelowADInplaceOrView below;  // else the output counts as a view of a temporary
    return linear_of_rows(input, weight, bias);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(3);
    const SavedTensors kept(ctx);
    std::vector<Tensor> g(3);
    const Tensor rows = grad.reshape({-1, grad.size(-1)});
    if (ctx->needs_input_grad(1)) g[1] = weight_gradient_by_columns(kept, rows);
    if (ctx->needs_input_grad(1) && !g[1].defined())
      kept.by_rows(0, [&](int64_t first, const Tensor& input) {
        const Tensor some = rows.narrow(0, first, input.size(0)).t();
        g[1] = g[1].defined() ? g[1].addmm_(some, input) : some.mm(input);
      });
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) g[2] = rows.sum(0);
    if (ctx->needs_input_grad(0)) {
      const Tensor weight = kept[1];
      auto sizes = grad.sizes().vec();
      sizes.back() = weight.size(1);
      g[0] = rows.mm(weight).view(sizes);
    }
    return g;
  }
};

Tensor run_linear(const Tensor& input, const Tensor& weight, const OptTensor& bias, int64_t recompute) {
  const OptTensor b = defined(bias);
  const bool ours = needs_grad(input, weight, value_or_undefined(b)) && plain(input) && plain(weight) &&
                    (!b || (plain(*b) && b->dim() == 1)) && input.dim() >= 2 && weight.dim() == 2 &&
                    input.numel() > 0 && weight.numel() > 0;
  if (!ours) return at::linear(input, weight, bias);
  const Tensor out = Linear::apply(input, weight, b);
  const double flops = 2.0 * static_cast<double>(out.numel()) * static_cast<double>(weight.size(1));
  const LayerOffer offered = as_cheap_layer(recompute, out, input, weight, value_or_undefined(b), flops);
  offer(
      out, {input, weight, value_or_undefined(b)},
      [](std::vector<Tensor>& from, const std::vector<bool>&) {
        return linear_of_rows(from[0], from[1], optional(from[2]));
      },
      offered.recompute, Pieces::no, offered.cost);
  return out;
}

template <c10::DeviceType device>
Tensor linear_autocast(const Tensor& input, const Tensor& weight, const OptTensor& bias, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto to = at::autocast::get_lower_precision_fp_from_device_type(device);
  return run_linear(cast_for_autocast(to, input, device, recompute), cast_for_autocast(to, weight, device),
                    at::autocast::cached_cast(to, bias, device), recompute);
}

}  // namespace

void register_linear(torch::Library& m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None, int recompute=0) -> Tensor", TORCH_FN(run_linear));
  m.impl("linear", c10::DispatchKey::AutocastCPU, TORCH_FN(linear_autocast<c10::DeviceType::CPU>));
  m.impl("linear", c10::DispatchKey::AutocastCUDA, TORCH_FN(linear_autocast<c10::DeviceType::CUDA>));
}

}  // namespace tsmem
