#pragma once
#include "common.h"
#include "recompute_argument.h"

namespace tsmem {

struct AttentionArgs {
  OptTensor mask;  // of booleans, or added to the scores
  bool causal = false;
  std::optional<double> scale;
  double dropout = 0;
  bool shares_heads = false;  // key and value may have fewer heads than query (enable_gqa)
};

// Whether the fused kernel takes the mask: one of booleans, or of query's dtype that needs no gradient.
inline bool is_fixed(const at::Tensor& mask, const at::Tensor& query) {
  return mask.scalar_type() == at::kBool ||
         (plain(mask) && !mask.requires_grad() && mask.scalar_type() == query.scalar_type());
}

// The mask as it is added to the scores of `query`.
OptTensor added_mask(const OptTensor& mask, const at::Tensor& query);

// Attention by PyTorch's operators for products of matrices, which can be differentiated twice. noise: which
// probabilities stay, in their sizes, or undefined.
at::Tensor attention_by_pytorch(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const AttentionArgs& args, const at::Tensor& noise);

// Attention that no fused kernel of the CPU takes: with dropout, or a mask that needs a gradient. Keeps query, key,
// value, mask and a bit of noise a probability, none of the probabilities, which forward and backward make in blocks of
// batches and heads. query, key: [N, H, L or S, E], value: [N, H, S, V], mask: broadcasts to [N, H, L, S]; the output
// is contiguous.
bool takes_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const AttentionArgs& args);
at::Tensor attention_by_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const AttentionArgs& args, RecomputeArgument recompute);

}  // namespace tsmem
