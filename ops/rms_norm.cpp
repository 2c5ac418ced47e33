// rms_norm: keeps its input (or what that is made from) and one number a row; its output can be recomputed.
//
// Numbers as aten::rms_norm (ATen/native/layer_norm.cpp, rms_norm_symint): 16-bit inputs are computed in float32; on
// the CPU a few rows at a time, which stay in cache.
#include <ATen/autocast_mode.h>

#include "function.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kElements = 1 << 16;  // elements

// f(first row, end) for blocks of the rows of a matrix.
template <class F>
void each_block(const Tensor& matrix, F f) {
  const int64_t rows = matrix.size(0);
  const int64_t some = matrix.is_cpu() ? std::max<int64_t>(kElements / matrix.size(1), 1) : rows;
  for (int64_t i = 0; i < rows; i += some) f(i, std::min(rows, i + some));
}

Tensor as_matrix(const Tensor& x, int64_t columns) { return x.reshape({-1, columns}); }

// Whether PyTorch has one kernel for it.
bool fused(const Tensor& x, const OptTensor& weight) {
  return x.is_cuda() && (!weight || weight->scalar_type() == x.scalar_type());
}

// The output, and the inverse root of the mean square of each row, [rows, 1]. x: [..., columns in all].
std::pair<Tensor, Tensor> rms_norm_forward(const Tensor& x, const OptTensor& weight, int64_t columns, double eps) {
  const auto dtype = acc_type(x.scalar_type());
  const Tensor rows = as_matrix(x, columns), scale = weight ? weight->reshape({columns}) : Tensor();
  if (fused(x, weight)) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [normal, root] = at::_fused_rms_norm(rows, columns, optional(scale), eps);
    return {normal.view(x.sizes()), root};
  }
  const Tensor out = at::empty(x.sizes(), x.options()), to = as_matrix(out, columns);
  const Tensor inverse = at::empty({rows.size(0), 1}, x.options().dtype(dtype));
  each_block(rows, [&](int64_t begin, int64_t end) {
    const Tensor some = rows.slice(0, begin, end).to(dtype);
    const Tensor root = inverse.slice(0, begin, end).copy_(some.pow(2).mean({-1}, /*keepdim=*/true).add_(eps).rsqrt_());
    Tensor normal = some * root;
    if (scale.defined()) normal.mul_(scale);
    to.slice(0, begin, end).copy_(normal);
  });
  return {out, inverse};
}

// The same output by operators that can be differentiated twice.
Tensor composed_rms_norm(const Tensor& x, const Tensor& weight, int64_t columns, double eps) {
  const Tensor rows = as_matrix(x, columns).to(acc_type(x.scalar_type()));
  Tensor normal = rows * (rows.pow(2).mean({-1}, /*keepdim=*/true) + eps).rsqrt();
  if (weight.defined()) normal = normal * weight.reshape({columns});
  return normal.view(x.sizes()).to(x.scalar_type());
}

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, int64_t columns, double eps) {
    ctx->set_materialize_grads(false);
    const auto [out, inverse] = rms_norm_forward(x, weight, columns, eps);
    Keeper keeper;
    keeper.add(x);
    keeper.add(x.requires_grad() ? value_or_undefined(weight) : Tensor());
    keeper.add(inverse, /*always_itself=*/true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["columns"] = columns;
    data["eps"] = eps;
    data["fused"] = fused(x, weight);
    if (weight) data["shape"] = weight->sizes();
    data["dtype"] = dtype_of(weight);
    return out;
  }

  // With n = x * inverse: dweight = sum of dy n, dx = inverse (dn - n mean(dn n)), where dn = dy weight.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const SavedTensors kept(ctx);
    auto& data = ctx->saved_data;
    const int64_t columns = data["columns"].toInt();
    const bool want_x = ctx->needs_input_grad(0), want_weight = data.count("shape") && ctx->needs_input_grad(1);
    if (at::GradMode::is_enabled()) {
      Tensor weight = kept[1];
      if (want_weight && !weight.defined()) weight = at::ones(data["shape"].toIntVector(), kept[2].options());
      const double eps = data["eps"].toDouble();
      const auto g =
          differentiable_gradients({kept[0], weight}, std::array<bool, 2>{want_x, want_weight}, grads[0],
                                   [&](const auto& t) { return composed_rms_norm(t[0], t[1], columns, eps); });
      result[0] = g[0];
      result[1] = in_dtype(g[1], data["dtype"]);
      return result;
    }
    const bool overwrite = only_ours(grads[0]) && grads[0].is_contiguous();
    std::vector<Tensor> g(2);
    {
      const Tensor x = kept[0], inverse = kept[2];
      const auto dtype = inverse.scalar_type();
      const Tensor rows = as_matrix(x, columns), dy = as_matrix(grads[0], columns);
      const Tensor scale = kept[1].defined() ? kept[1].reshape({columns}) : Tensor();
      if (data["fused"].toBool() && (scale.defined() || !want_weight)) {
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [dx, dw] = at::_fused_rms_norm_backward(dy.contiguous(), rows, columns, inverse, optional(scale),
                                                           std::array<bool, 2>{want_x, want_weight});
        if (want_x) result[0] = dx.view(x.sizes());
        if (want_weight) result[1] = dw.view(data["shape"].toIntVector());
        return result;
      }
      if (want_x) g[0] = overwrite ? grads[0] : at::empty(x.sizes(), x.options());
      const Tensor dx = want_x ? as_matrix(g[0], columns) : Tensor();
      if (want_weight) g[1] = at::zeros({columns}, inverse.options());
      each_block(rows, [&](int64_t begin, int64_t end) {
        const Tensor root = inverse.slice(0, begin, end), n = rows.slice(0, begin, end).to(dtype) * root;
        Tensor dn = dy.slice(0, begin, end).to(dtype);
        if (want_weight) g[1].add_((dn * n).sum(0));
        if (!want_x) return;
        if (scale.defined()) dn = dn * scale;
        const Tensor along = (dn * n).mean({-1}, /*keepdim=*/true);
        dx.slice(0, begin, end).copy_((dn - n * along).mul_(root));
      });
      if (want_weight) g[1] = in_dtype(g[1], data["dtype"]).view(data["shape"].toIntVector());
    }
    if (want_x) result[0] = g[0];
    if (want_weight) result[1] = g[1];
    return result;
  }
};

// CUDA's autocast may run it in float32.
bool autocast_casts(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::rms_norm", "");
  const auto device = x.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return false;
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  return op.hasKernelForDispatchKey(key) && !c10::impl::tls_is_dispatch_key_excluded(key);
}

Tensor rms_norm(const Tensor& x, at::IntArrayRef shape, const OptTensor& weight, std::optional<double> eps,
                int64_t recompute) {
  if (autocast_casts(x)) {
    const auto device = x.device().type();
    c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return rms_norm(cast_for_autocast(at::kFloat, x, device, recompute), shape,
                    cast_for_autocast(at::kFloat, weight, device), eps, recompute);
  }
  const OptTensor w = defined(weight);
  const int64_t lead = x.dim() - static_cast<int64_t>(shape.size());
  const bool ours = needs_grad(x, value_or_undefined(w)) && plain(x) && x.numel() > 0 && !shape.empty() && lead >= 0 &&
                    x.sizes().slice(lead) == shape &&
                    x.suggest_memory_format() == at::MemoryFormat::Contiguous &&  // else the output's strides follow it
                    (!w || (plain(*w) && w->sizes() == shape && w->device() == x.device() &&
                            (w->scalar_type() == x.scalar_type() || low_precision(x))));
  if (!ours) return at::rms_norm(x, shape, weight, eps);
  const int64_t columns = c10::multiply_integers(shape);
  const double smallest = acc_type(x.scalar_type()) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                                   : std::numeric_limits<float>::epsilon();
  const double added = eps.value_or(smallest);
  const Tensor out = RmsNorm::apply(x, w, columns, added);
  offer(
      out, {x, value_or_undefined(w)},
      [columns, added](std::vector<Tensor>& from, const std::vector<bool>&) {
        return rms_norm_forward(from[0], optional(from[1]), columns, added).first;
      },
      recompute, Pieces::no, {}, shape.size() == 1 ? Rows::own : Rows::all);
  return out;
}

}  // namespace

void register_rms_norm(torch::Library& m) {
  m.def(
      "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None, int recompute=0) -> Tensor",
      TORCH_FN(rms_norm));
}

}  // namespace tsmem
