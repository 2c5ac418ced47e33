// Attention over two, five and more dimensions for the CPU's fused kernel, which takes [N, H, L, E]: within windows, or
// over one of space and time. PyTorch computes these by products of whole matrices, and keeps the probabilities. (Three
// it gives to the fused kernel itself, from some version on.)
#pragma once
#include "attention_blocks.h"

namespace tsmem {

// Whether the fused kernel can take the operands once they are folded. query: [.., H, L, E]; key and value:
// [.., H, S, E], or with fewer heads where args.shares_heads.
bool folds(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const AttentionArgs& args);

// Sizes of query's dimensions but the last two, at least two.
std::vector<int64_t> leading_sizes(const at::Tensor& query);

// How operands become four-dimensional.
struct Fold {
  std::vector<int64_t> leading;  // sizes
  int64_t heads;                 // which of them stays by itself; the others become one
};

// The one that copies nothing of these, where there is one. It depends on their strides: backward takes forward's.
Fold fold_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// Any operand, the output, or a gradient of one of them.
at::Tensor fold(const Fold& how, const at::Tensor& t);
OptTensor fold_mask(const Fold& how, const OptTensor& mask);
at::Tensor unfold(const Fold& how, const at::Tensor& folded, at::IntArrayRef sizes);

}  // namespace tsmem
