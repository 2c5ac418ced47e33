// Numbers and draws as at::_scaled_dot_product_attention_math (ATen/native/transformers/attention.cpp): query and key
// are scaled by the scale's root, 16-bit operands computed in float32, noise drawn for all probabilities at once.
#include "attention_blocks.h"

#include "function.h"
#include "pack.h"
#include "recompute.h"

namespace tsmem {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptTensor added_mask(const OptTensor& mask, const Tensor& query) {
  if (!mask || mask->scalar_type() != at::kBool) return mask;
  return at::zeros_like(*mask, query.options())
      .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

namespace {

constexpr int64_t kProbabilities = 1 << 19;  // probabilities of a block, which cores' caches hold

// A block of batches and heads; of(t) is that of a tensor, which may have one batch or head for all.
struct Part {
  int64_t batch, batches, head, heads;
  Tensor of(const Tensor& t) const {
    if (!t.defined()) return t;
    const Tensor some = t.size(0) == 1 ? t : t.narrow(0, batch, batches);
    return some.size(1) == 1 ? some : some.narrow(1, head, heads);
  }
};

template <class F>
void each_block_of_rows(const Tensor& q, const Tensor& k, F f) {
  const int64_t n = q.size(0), h = q.size(1), each = q.size(2) * k.size(2);
  const int64_t heads = std::clamp<int64_t>(kProbabilities / each, 1, h),
                batches = std::clamp<int64_t>(kProbabilities / (each * h), 1, n);
  for (int64_t i = 0; i < n; i += batches)
    for (int64_t j = 0; j < h; j += heads) f(Part{i, std::min(batches, n - i), j, std::min(heads, h - j)});
}

// What forward and backward compute with, in the dtype that they do it in.
struct Scores {
  Tensor q, k, v, mask, noise;
  at::ScalarType dtype;
  double root, dropout;

  Scores(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionArgs& args, const Tensor& drawn)
      : q(query), k(key), v(value), noise(drawn), dropout(args.dropout) {
    dtype = low_precision(q) ? at::kFloat : q.scalar_type();
    root = std::sqrt(args.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))));
    const OptTensor added = added_mask(args.mask, q);
    if (args.causal)
      mask = at::full({q.size(2), k.size(2)}, -std::numeric_limits<double>::infinity(), q.options()).triu_(1);
    else if (added)
      mask = *added;
    while (mask.defined() && mask.dim() < 4) mask = mask.unsqueeze(0);
  }

  Tensor scaled(const Tensor& t, const Part& part) const { return part.of(t).to(dtype) * root; }

  Tensor probabilities(const Tensor& scaled_q, const Tensor& scaled_k, const Part& part) const {
    Tensor scores = at::matmul(scaled_q, scaled_k.transpose(-2, -1));
    if (mask.defined()) scores.add_(part.of(mask));
    const Tensor p = at::softmax(scores, -1);
    // A row that is masked as a whole: PyTorch gives zeros.
    if (!p.is_meta() && p.select(-1, 0).isnan().any().item<bool>()) return at::_safe_softmax(scores, -1);
    return p;
  }

  // What probabilities are multiplied with.
  Tensor factor(const Part& part) const { return part.of(noise).to(dtype).div_(1 - dropout); }

  Tensor output() const {
    const Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    each_block_of_rows(q, k, [&](const Part& part) {
      Tensor p = probabilities(scaled(q, part), scaled(k, part), part);
      if (noise.defined()) p.mul_(factor(part));
      part.of(out).copy_(at::matmul(p, part.of(v).to(dtype)));
    });
    return out;
  }
};

std::vector<int64_t> sizes_of_noise(const Tensor& q, const Tensor& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
}

// From its bits, where there is any.
Tensor noise_again(const Tensor& bits, const Tensor& q, const Tensor& k) {
  if (!bits.defined()) return bits;
  const auto sizes = sizes_of_noise(q, k);
  return unpack(bits, 1, sizes, c10::contiguous_strides(sizes), at::kBool);
}

struct Blocks : Function<Blocks> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask,
                        const AttentionArgs& args, Tensor* bits) {
    ctx->set_materialize_grads(false);
    Tensor noise;
    if (args.dropout > 0) {
      noise = at::empty(sizes_of_noise(q, k), q.options().dtype(at::kBool)).bernoulli_(1 - args.dropout);
      *bits = pack(noise, 1);
    }
    Keeper keeper;
    for (const Tensor* t : {&q, &k, &v}) keeper.add(*t);
    keeper.add(value_or_undefined(mask));
    keeper.add(*bits, /*always_itself=*/true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["causal"] = args.causal;
    data["scale"] = args.scale;
    data["dropout"] = args.dropout;
    return Scores(q, k, v, args, noise).output();
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(6);
    const SavedTensors kept(ctx);
    auto& data = ctx->saved_data;
    const OptTensor mask = optional(kept[3]);
    const AttentionArgs args{mask, data["causal"].toBool(), data["scale"].toOptional<double>(),
                             data["dropout"].toDouble()};
    if (at::GradMode::is_enabled()) {
      std::array<bool, 4> want;
      for (int i : {0, 1, 2, 3}) want[i] = (i < 3 || mask) && ctx->needs_input_grad(i);
      auto again = differentiable_gradients({kept[0], kept[1], kept[2], kept[3]}, want, grad, [&](const auto& t) {
        return attention_by_pytorch(t[0], t[1], t[2], {optional(t[3]), args.causal, args.scale, args.dropout},
                                    noise_again(kept[4], t[0], t[1]));
      });
      again.resize(6);
      return again;
    }
    std::vector<Tensor> g(6);
    {
      const Tensor q = kept[0], k = kept[1], v = kept[2];
      const Scores scores(q, k, v, args, noise_again(kept[4], q, k));
      const Tensor* operands[] = {&q, &k, &v};
      for (int i : {0, 1, 2})
        if (ctx->needs_input_grad(i)) g[i] = at::empty_like(*operands[i]);
      if (mask && ctx->needs_input_grad(3)) g[3] = at::zeros(scores.mask.sizes(), mask->options().dtype(scores.dtype));
      each_block_of_rows(q, k, [&](const Part& part) { gradients(scores, part, grad, g); });
      if (g[3].defined()) g[3] = g[3].view(mask->sizes()).to(mask->scalar_type());
    }
    return g;
  }

 private:
  // Writes one block of the gradients of query, key and value, and adds to that of the mask; those that are undefined
  // are not wanted.
  static void gradients(const Scores& s, const Part& part, const Tensor& grad, const std::vector<Tensor>& g) {
    const Tensor q = s.scaled(s.q, part), k = s.scaled(s.k, part), dy = part.of(grad).to(s.dtype);
    const Tensor p = s.probabilities(q, k, part);
    const Tensor factor = s.noise.defined() ? s.factor(part) : Tensor();
    if (g[2].defined()) part.of(g[2]).copy_(at::matmul((factor.defined() ? p * factor : p).transpose(-2, -1), dy));
    if (!g[0].defined() && !g[1].defined() && !g[3].defined()) return;
    Tensor dp = at::matmul(dy, part.of(s.v).to(s.dtype).transpose(-2, -1));
    if (factor.defined()) dp.mul_(factor);
    dp = at::_softmax_backward_data(dp, p, -1, s.dtype);
    if (g[3].defined()) {
      Tensor some = part.of(g[3]);
      some.add_(dp.sum_to_size(some.sizes()));
    }
    if (g[0].defined()) part.of(g[0]).copy_(at::matmul(dp, k).mul_(s.root));
    if (g[1].defined()) part.of(g[1]).copy_(at::matmul(dp.transpose(-2, -1), q).mul_(s.root));
  }
};

}  // namespace

Tensor attention_by_pytorch(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                            const Tensor& noise) {
  return std::get<0>(at::_scaled_dot_product_attention_math(
      q, k, v, added_mask(args.mask, q), args.dropout, args.causal, optional(noise), args.scale, args.shares_heads));
}

bool takes_blocks(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args) {
  const auto fits = [&](const Tensor& t) {
    return plain(t) && (t.is_cpu() || t.is_meta()) && !t.key_set().has(c10::DispatchKey::Python) && t.dim() == 4 &&
           t.numel() > 0 && t.scalar_type() == q.scalar_type() && t.size(0) == q.size(0) && t.size(1) == q.size(1);
  };
  if (!fits(q) || !fits(k) || !fits(v) || q.size(3) != k.size(3) || k.size(2) != v.size(2)) return false;
  if (args.dropout < 0 || args.dropout >= 1 || args.scale.value_or(1) <= 0) return false;
  if (low_precision(q) && at::globalContext().allowFP16BF16ReductionMathSDP()) return false;
  if (!args.mask) return true;
  const Tensor& mask = *args.mask;
  const bool of_type = mask.scalar_type() == at::kBool || (plain(mask) && mask.scalar_type() == q.scalar_type());
  return of_type && mask.device() == q.device() && !args.causal && mask.dim() <= 4 &&
         at::is_expandable_to(mask.sizes(), {q.size(0), q.size(1), q.size(2), k.size(2)});
}

Tensor attention_by_blocks(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                           RecomputeArgument recompute) {
  Tensor bits;
  const Tensor out = Blocks::apply(q, k, v, args.mask, args, &bits);
  const double flops = 4.0 * static_cast<double>(out.numel()) * static_cast<double>(k.size(2));
  offer(out, {q, k, v, value_or_undefined(args.mask), std::exchange(bits, Tensor())},
        [causal = args.causal, scale = args.scale, dropout = args.dropout](std::vector<Tensor>& from,
                                                                           const std::vector<bool>&) {
          const AttentionArgs again{optional(from[3]), causal, scale, dropout};
          return Scores(from[0], from[1], from[2], again, noise_again(from[4], from[0], from[1])).output();
        },
        recompute, Pieces::no, {flops, true});
  return out;
}

}  // namespace tsmem
