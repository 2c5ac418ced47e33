#include "attention_dimensions.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>

#include "cpu_dtype.h"

namespace tsmem {

using at::Tensor;

namespace {

Tensor at_least_four(Tensor t) {
  while (t.dim() < 4) t = t.unsqueeze(0);
  return t;
}

// [.., H, .., L, E] with the heads next to the rows.
Tensor heads_last(const Tensor& t, int64_t heads) { return t.movedim(heads, -3); }

bool folds_as_a_view(const Tensor& t, int64_t heads) {
  const Tensor moved = heads_last(t, heads);
  const auto sizes = at::infer_size_dv({-1, moved.size(-3), moved.size(-2), moved.size(-1)}, moved.numel());
  return at::detail::computeStride(moved.sizes(), moved.strides(), sizes).has_value();
}

// A mask has all batches, or one for all.
bool mask_folds(const Tensor& mask, const Tensor& query, const Tensor& key) {
  auto sizes = query.sizes().vec();
  sizes.back() = key.size(-2);
  if (mask.dim() < 2 || !at::is_expandable_to(mask.sizes(), sizes)) return false;
  return mask.dim() == 2 || mask.sizes() == at::IntArrayRef(sizes);
}

}  // namespace

bool folds(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args) {
  const int64_t dims = q.dim();
  if (dims != 2 && dims < 5) return false;
  const auto fits = [&](const Tensor& t) {
    if (!plain(t) || !(t.is_cpu() || t.is_meta()) || t.key_set().has(c10::DispatchKey::Python) || t.numel() == 0 ||
        t.scalar_type() != q.scalar_type() || !has_cpu_dtype(t.scalar_type()) || t.dim() != dims ||
        t.size(-1) != q.size(-1))
      return false;
    for (int64_t i = 0; i < dims - 2; ++i) {
      const bool shared = args.shares_heads && i == dims - 3 && q.size(i) % t.size(i) == 0;
      if (t.size(i) != q.size(i) && !shared) return false;
    }
    return true;
  };
  if (!fits(q) || !fits(k) || !fits(v) || k.sizes() != v.sizes()) return false;
  if (args.dropout != 0 || args.scale.value_or(1) <= 0 || (args.mask && args.causal)) return false;
  const at::Context& context = at::globalContext();
  if (!context.userEnabledFlashSDP() || (low_precision(q) && context.allowFP16BF16ReductionMathSDP())) return false;
  if (!args.mask) return true;
  return is_fixed(*args.mask, q) && args.mask->device() == q.device() && mask_folds(*args.mask, q, k);
}

std::vector<int64_t> leading_sizes(const Tensor& q) {
  const Tensor whole = at_least_four(q);
  return whole.sizes().slice(0, whole.dim() - 2).vec();
}

Fold fold_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  Fold how{leading_sizes(q), 0};
  how.heads = static_cast<int64_t>(how.leading.size()) - 1;
  if (how.leading.size() == 2 || k.size(-3) != q.size(-3)) return how;
  for (int64_t heads = how.heads; heads >= 0; --heads)
    if (folds_as_a_view(q, heads) && folds_as_a_view(k, heads) && folds_as_a_view(v, heads)) {
      how.heads = heads;
      break;
    }
  return how;
}

Tensor fold(const Fold& how, const Tensor& t) {
  const Tensor folded = t.dim() <= 4 ? at_least_four(t) : heads_last(t, how.heads).flatten(0, -4);
  return folded.stride(-1) == 1 ? folded : folded.contiguous();
}

OptTensor fold_mask(const Fold& how, const OptTensor& mask) {
  if (!mask || mask->dim() == 2) return mask;
  return heads_last(*mask, how.heads).flatten(0, -4);
}

Tensor unfold(const Fold& how, const Tensor& folded, at::IntArrayRef sizes) {
  if (sizes.size() <= 4) return folded.view(sizes);
  std::vector<int64_t> moved = how.leading;
  moved.erase(moved.begin() + how.heads);
  moved.insert(moved.end(), {folded.size(1), folded.size(2), folded.size(3)});
  return folded.unflatten(0, at::IntArrayRef(moved).slice(0, moved.size() - 3)).movedim(-3, how.heads);
}

}  // namespace tsmem
