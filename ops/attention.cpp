// Attention and what it is spelled out with: scaled_dot_product_attention, matmul, softmax.
//
// Attention (CPU, its flash kernel) keeps query, key and value, or what they are made from, beside its output and a
// logarithm a row; where it is recomputed neither of the latter. With dropout: attention_blocks.h; over other than four
// dimensions: attention_dimensions.h. A product of
// matrices keeps its factors, or what they are made from; softmax its output, or its input where that costs nothing.
// Everything else is PyTorch's.
//
// Backwards as derivatives.yaml has them for aten::_scaled_dot_product_flash_attention_for_cpu, aten::bmm and
// aten::_softmax.

#include <ATen/autocast_mode.h>

#include "attention_blocks.h"
#include "attention_dimensions.h"
#include "function.h"
#include "linear.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMath = 0, kFlash = 1;  // sdp::SDPBackend

// What the fused kernel gives. Of other than four dimensions the logarithms are those of the folded operands.
struct AttentionResult {
  Tensor out, logsumexp;
  std::optional<Fold> how;
};

// What an attention that is recomputed found the last time. Its output is held for the op's own backward by the recipe.
struct Again {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> out;
  Tensor logsumexp;
  std::optional<Fold> how;
  std::mutex mutex;

  AttentionResult take() {
    std::lock_guard lock(mutex);
    auto impl = out ? out->lock() : nullptr;
    return {impl ? Tensor(std::move(impl)) : Tensor(), std::exchange(logsumexp, Tensor()), how};
  }
  // Until it is taken or the pass of backward is over.
  static void put(const std::shared_ptr<Again>& again, const AttentionResult& made) {
    if (!when_pass_ends([weak = std::weak_ptr<Again>(again)] {
          if (const auto a = weak.lock()) a->take();
        }))
      return;
    std::lock_guard lock(again->mutex);
    again->out.emplace(made.out.getIntrusivePtr());
    again->logsumexp = made.logsumexp;
    again->how = made.how;
  }
};

AttentionResult flash(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& a) {
  at::AutoDispatchBelowADInplaceOrView below;  // else the output counts as a view of a temporary
  if (q.dim() == 4) {
    auto [out, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, a.causal, added_mask(a.mask, q), a.scale);
    return {std::move(out), std::move(sums), {}};
  }
  const Fold how = fold_of(q, k, v);
  const auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      fold(how, q), fold(how, k), fold(how, v), 0.0, a.causal, added_mask(fold_mask(how, a.mask), q), a.scale);
  return {unfold(how, out, q.sizes()).contiguous(), sums, how};  // as PyTorch's product is
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const AttentionResult& made, const AttentionArgs& a) {
  if (!made.how)
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, made.out, made.logsumexp, 0.0,
                                                                    a.causal, added_mask(a.mask, q), a.scale);
  const Fold& how = *made.how;
  const auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      fold(how, grad), fold(how, q), fold(how, k), fold(how, v), fold(how, made.out), made.logsumexp, 0.0, a.causal,
      added_mask(fold_mask(how, a.mask), q), a.scale);
  return {unfold(how, gq, q.sizes()), unfold(how, gk, k.sizes()), unfold(how, gv, v.sizes())};
}

struct Attention : Function<Attention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionArgs& args, const std::shared_ptr<Again>& again, Tensor* kept) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    for (const Tensor* t : {&q, &k, &v}) keeper.add(*t);
    keeper.add(value_or_undefined(args.mask), true);
    AttentionResult made = flash(q, k, v, args);
    *kept = keeper.add_result(again ? Tensor() : made.out);
    keeper.add(again ? Tensor() : made.logsumexp, true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["causal"] = args.causal;
    data["scale"] = args.scale;
    data["shares_heads"] = args.shares_heads;
    if (made.how) data["heads"] = made.how->heads;
    if (again) data["again"] = at::IValue::make_capsule(c10::make_intrusive<Shared>(again));
    return made.out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(6);
    auto& data = ctx->saved_data;
    AttentionResult made;
    // Before SavedTensors lets the output go.
    if (data.count("again"))
      made = c10::static_intrusive_pointer_cast<Shared>(data["again"].toCapsule())->again->take();
    const SavedTensors kept(ctx);
    const Tensor q = kept[0], k = kept[1], v = kept[2];
    const AttentionArgs args{optional(kept[3]), data["causal"].toBool(), data["scale"].toOptional<double>(), 0,
                             data["shares_heads"].toBool()};
    if (at::GradMode::is_enabled()) {
      const std::array<bool, 3> want = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
      auto g = differentiable_gradients(
          {q, k, v}, want, grad, [&](const auto& t) { return attention_by_pytorch(t[0], t[1], t[2], args, {}); });
      g.resize(6);
      return g;
    }
    if (!data.count("again")) {
      made = {kept[4], kept[5], {}};
      if (data.count("heads")) made.how = Fold{leading_sizes(q), data["heads"].toInt()};
    } else if (!made.out.defined() || !made.logsumexp.defined()) {
      made = flash(q, k, v, args);
    }
    auto [gq, gk, gv] = flash_backward(grad, q, k, v, made, args);
    std::vector<Tensor> g = {gq, gk, gv, Tensor(), Tensor(), Tensor()};
    for (int i : {0, 1, 2})
      if (!ctx->needs_input_grad(i)) g[i] = Tensor();
    return g;
  }

  struct Shared : torch::CustomClassHolder {
    explicit Shared(std::shared_ptr<Again> a) : again(std::move(a)) {}
    std::shared_ptr<Again> again;
  };
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& attn_mask, double dropout_p,
                 bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t recompute) {
  OptTensor mask = defined(attn_mask);
  const auto alike = [&](const Tensor& t) {
    return plain(t) && (t.is_cpu() || t.is_meta()) && t.dim() == 4 && t.numel() > 0 &&
           t.scalar_type() == q.scalar_type();
  };
  const AttentionArgs args{mask, is_causal, scale, dropout_p, enable_gqa};
  const bool usual = needs_grad(q, k, v, value_or_undefined(mask)) && alike(q) && alike(k) && alike(v) &&
                     !(mask && is_causal);  // PyTorch raises
  const int64_t backend = !usual ? -1
                          : q.is_meta()  // stands for the CPU
                              ? dropout_p > 0            ? kMath
                                : q.size(3) == v.size(3) ? kFlash
                                                         : -1
                              : at::_fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa);
  if (backend == kMath && takes_blocks(q, k, v, args)) {
    const bool if_cheap = RecomputeArgument(recompute).how == Recompute::if_cheap;  // these blocks are not
    return attention_by_blocks(q, k, v, args, if_cheap ? Recompute::off : RecomputeArgument(recompute));
  }
  const bool by_fold = q.dim() != 4 && needs_grad(q, k, v) && folds(q, k, v, args);
  const bool fused = backend == kFlash && dropout_p == 0 && (!mask || is_fixed(*mask, q));
  if (!fused && !by_fold)
    return at::scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  const RecomputeArgument offered = as_cheap_attention(recompute, q, k, v, is_causal);
  // Null: the output is kept. The node owns it; the recipe outlives the node, and holds nothing.
  const auto again = offered.recomputes() && !hooks_active() ? std::make_shared<Again>() : nullptr;
  Tensor kept;
  const Tensor out = Attention::apply(q, k, v, args, again, &kept);
  if (!again) keeps_itself(out, kept);
  const double flops = 4.0 * static_cast<double>(out.numel()) * static_cast<double>(k.size(-2));
  offer(out, {q, k, v, value_or_undefined(mask)},
        [is_causal, scale, enable_gqa, node = std::weak_ptr<Again>(again)](std::vector<Tensor>& from,
                                                                           const std::vector<bool>&) {
          const AttentionResult made =
              flash(from[0], from[1], from[2], {optional(from[3]), is_causal, scale, 0, enable_gqa});
          if (const auto a = node.lock()) Again::put(a, made);
          return made.out;
        },
        offered, Pieces::no, {flops, true});
  return out;
}

// A factor of a batched product as at::matmul keeps it: with batches that can't be put together without it, a copy.
// Then the factor may be changed before backward.
Tensor copied_by_aten(const Tensor& t, bool folded) {
  const Tensor flat = folded ? t.reshape({-1, t.size(-1)}) : t.dim() > 2 ? t.reshape({-1, t.size(-2), t.size(-1)}) : t;
  return flat.is_alias_of(t) ? t : flat.view(t.sizes());
}

// at::matmul, with the rows of all images put together where b has no batches.
Tensor batched_product(const Tensor& a, const Tensor& b) {
  return b.dim() > 2 ? at::matmul(a, b) : linear_of_rows(a, b.t(), std::nullopt);
}

struct Matmul : Function<Matmul> {
  // factors: a and b, of which those that are kept as copies are these afterwards.
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, std::vector<Tensor>* factors) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    for (int i : {0, 1}) {
      Tensor& t = (*factors)[i];
      const Tensor& given = i == 0 ? a : b;
      const bool needed = (i == 0 ? b : a).requires_grad();
      if (needed && !costs_nothing(given)) {
        at::AutoDispatchBelowADInplaceOrView below;
        t = copied_by_aten(given, i == 0 && b.dim() == 2);
      }
      if (needed && !t.is_same(given))
        keeper.add_copy(t, given);
      else
        keeper.add(needed ? t : Tensor());
    }
    keeper.save(ctx);
    ctx->saved_data["a"] = a.sizes();
    ctx->saved_data["b"] = b.sizes();
    ctx->saved_data["a_by_columns"] = a.dim() == 2 && by_columns(a);
    ctx->saved_data["b_by_columns"] = b.dim() == 2 && by_columns(b);
    at::AutoDispatchBelowADInplaceOrView below;  // else the output counts as a view of a temporary
    return batched_product((*factors)[0], (*factors)[1]);
  }

  // The gradient of one matrix by which all images were multiplied: not one product an image.
  static Tensor of_matrix(const Tensor& a, const Tensor& grad, bool by_columns) {
    const Tensor rows = a.reshape({-1, a.size(-1)}), grads = grad.reshape({-1, grad.size(-1)});
    return by_columns ? grads.t().mm(rows).t() : rows.t().mm(grads);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(3);
    const SavedTensors kept(ctx);
    const auto a_sizes = ctx->saved_data["a"].toIntVector(), b_sizes = ctx->saved_data["b"].toIntVector();
    std::vector<Tensor> g(3);
    // A factor that is recomputed is copied here: its transpose's copy would be another operand, and some processors'
    // products then round differently from PyTorch's.
    if (ctx->needs_input_grad(1)) {
      const Tensor a = copied_by_aten(kept[0], b_sizes.size() == 2);
      g[1] = b_sizes.size() == 2 ? of_matrix(a, grad, ctx->saved_data["b_by_columns"].toBool())
                                 : at::matmul(a.transpose(-2, -1), grad).sum_to_size(b_sizes);
    }
    if (ctx->needs_input_grad(0)) {
      const Tensor b = copied_by_aten(kept[1], false);
      g[0] = ctx->saved_data["a_by_columns"].toBool() ? b.mm(grad.t()).t()
                                                      : batched_product(grad, b.transpose(-2, -1)).sum_to_size(a_sizes);
    }
    return g;
  }
};

Tensor matmul(const Tensor& a, const Tensor& b, int64_t recompute) {
  const bool ours = needs_grad(a, b) && plain(a) && plain(b) && a.scalar_type() == b.scalar_type() &&
                    a.device() == b.device() && b.dim() >= 2 && a.dim() >= (b.dim() == 2 ? 2 : 3) && a.numel() > 0 &&
                    b.numel() > 0;
  if (!ours) return at::matmul(a, b);
  std::vector<Tensor> factors = {a, b};
  const Tensor out = Matmul::apply(a, b, &factors);
  const double flops = 2.0 * static_cast<double>(out.numel()) * static_cast<double>(a.size(-1));
  const LayerOffer offered = b.dim() == 2 ? as_cheap_layer(recompute, out, a, b, {}, flops)
                                          : as_cheap_product(recompute, out, a, b, {}, flops);
  offer(
      out, factors,
      [](std::vector<Tensor>& from, const std::vector<bool>&) { return batched_product(from[0], from[1]); },
      offered.recompute, Pieces::no, offered.cost);
  return out;
}

// Whether PyTorch's kernels go by rows, each of which they have read when they write it.
bool by_rows(const Tensor& t, int64_t dim) {
  return t.is_cpu() && t.dim() > 0 && at::maybe_wrap_dim(dim, t.dim()) == t.dim() - 1 && t.is_contiguous();
}

// In the memory of `x` where nobody needs that.
Tensor softmax_of(Tensor& x, int64_t dim, bool spare) {
  return spare && by_rows(x, dim) ? at::_softmax_out(x, x, dim, false) : at::softmax(x, dim);
}

Tensor softmax_backward(const Tensor& grad, const Tensor& out, int64_t dim) {
  if (by_rows(grad, dim) && by_rows(out, dim) && only_ours(grad) && grad.scalar_type() == out.scalar_type()) {
    Tensor in_place = grad;
    return at::_softmax_backward_data_out(in_place, grad, out, dim, out.scalar_type());
  }
  return at::_softmax_backward_data(grad, out, dim, out.scalar_type());
}

// What it keeps: its output, or (again) its input, from which its output is made for others too and then held for it.
struct Softmax : Function<Softmax> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, bool again, int64_t* place, Tensor* kept) {
    ctx->set_materialize_grads(false);
    const Tensor out = at::softmax(x, dim);
    Keeper keeper;
    keeper.add(again ? x : Tensor());
    *kept = keeper.add_result(again ? Tensor() : out);
    *place = keeper.save(ctx, /*soon=*/!again);
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["again"] = again;
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(5);
    const bool again = ctx->saved_data["again"].toBool();
    // Under create_graph it is made from the input, through which it is differentiated.
    Tensor out = again && !at::GradMode::is_enabled() ? own_output_made() : Tensor();
    const SavedTensors kept(ctx);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    if (!out.defined()) out = again ? at::softmax(kept[0], dim) : kept[1];
    std::vector<Tensor> g(5);
    g[0] = softmax_backward(grad, out, dim);
    return g;
  }
};

Tensor softmax(const Tensor& x, int64_t dim, std::optional<at::ScalarType> dtype, int64_t recompute) {
  if (!needs_grad(x) || !plain(x) || x.numel() == 0 || (dtype && *dtype != x.scalar_type()))
    return at::softmax(x, dim, dtype);
  // Its input in place of its output, where that costs nothing.
  const bool again = RecomputeArgument(recompute).recomputes() && costs_nothing(x);
  int64_t place = 0;
  Tensor kept;
  const Tensor out = Softmax::apply(x, dim, again, &place, &kept);
  if (!again) keeps_itself(out, kept);
  offer(
      out, {x},
      [dim](std::vector<Tensor>& from, const std::vector<bool>& spare) { return softmax_of(from[0], dim, spare[0]); },
      recompute);
  if (again) takes_own_output(out, place);
  return out;
}

Tensor drawing_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double dropout_p,
                         bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t recompute,
                         const c10::List<int64_t>&) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::scaled_dot_product_attention", "")
                             .typed<decltype(attention)>();
  return op.call(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, recompute);
}

template <c10::DeviceType device>
struct CastAttention {
  const int64_t recompute;
  const at::ScalarType low = at::autocast::get_lower_precision_fp_from_device_type(device);
  c10::impl::ExcludeDispatchKeyGuard guard{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  template <class T>
  T cast(const T& t, at::ScalarType to) const {
    return cast_for_autocast(to, t, device, recompute);
  }

  static Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double dropout_p,
                          bool causal, std::optional<double> scale, bool gqa, int64_t recompute) {
    const CastAttention a{recompute};
    return tsmem::attention(a.cast(q, a.low), a.cast(k, a.low), a.cast(v, a.low), a.cast(mask, a.low), dropout_p,
                            causal, scale, gqa, recompute);
  }
  static Tensor matmul(const Tensor& x, const Tensor& y, int64_t recompute) {
    const CastAttention a{recompute};
    return tsmem::matmul(a.cast(x, a.low), a.cast(y, a.low), recompute);
  }
  // CUDA's autocast runs it in float32, the CPU's leaves it alone.
  static Tensor softmax(const Tensor& x, int64_t dim, std::optional<at::ScalarType> dtype, int64_t recompute) {
    const CastAttention a{recompute};
    return tsmem::softmax(device == at::kCUDA && !dtype ? a.cast(x, at::kFloat) : x, dim, dtype, recompute);
  }
};

}  // namespace

void register_attention(torch::Library& m) {
  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float "
      "dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, int recompute=0) -> Tensor",
      TORCH_FN(attention));
  // `draw`: as dropout's, for what it draws where dropout_p is not 0.
  m.def(
      "scaled_dot_product_attention.draw(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
      "bool is_causal, float? scale, bool enable_gqa, int recompute, int[](a!) draw) -> Tensor",
      TORCH_FN(drawing_attention));
  m.def("matmul(Tensor self, Tensor other, int recompute=0) -> Tensor", TORCH_FN(matmul));
  m.def("softmax(Tensor self, int dim, ScalarType? dtype=None, int recompute=0) -> Tensor", TORCH_FN(softmax));
  m.impl("scaled_dot_product_attention", c10::DispatchKey::AutocastCPU,
         TORCH_FN(CastAttention<c10::DeviceType::CPU>::attention));
  m.impl("matmul", c10::DispatchKey::AutocastCPU, TORCH_FN(CastAttention<c10::DeviceType::CPU>::matmul));
  m.impl("scaled_dot_product_attention", c10::DispatchKey::AutocastCUDA,
         TORCH_FN(CastAttention<c10::DeviceType::CUDA>::attention));
  m.impl("matmul", c10::DispatchKey::AutocastCUDA, TORCH_FN(CastAttention<c10::DeviceType::CUDA>::matmul));
  m.impl("softmax", c10::DispatchKey::AutocastCUDA, TORCH_FN(CastAttention<c10::DeviceType::CUDA>::softmax));
}

}  // namespace tsmem
