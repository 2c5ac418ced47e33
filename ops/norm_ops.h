// The raw normalisation ops (schemas in norm_ops.cpp; for the CPU in cpu/, for shapes in meta/, for CUDA in cuda/) and
// what the public ops in batch_norm_act.cpp, mul_act.cpp and conv_batch_norm_act.cpp share.
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

#include "activation.h"
#include "common.h"
#include "pool_layout.h"
#include "recompute_argument.h"

namespace tsmem {

// float64 for float64, else float32: what statistics and coefficients are computed and kept in.
inline at::ScalarType acc_type(at::ScalarType t) { return t == at::kDouble ? at::kDouble : at::kFloat; }

// x, or its copy in acc_type where PyTorch's batch norms of its device don't take 16-bit maps beside parameters and
// statistics in float32.
at::Tensor beside_statistics(const at::Tensor& x);

// channels_last, channels_last_3d or contiguous.
inline at::MemoryFormat feature_format(int64_t dim, bool channels_last) {
  if (!channels_last) return at::MemoryFormat::Contiguous;
  return dim == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}
// A tensor of one channel, or of one pixel, may be both: PyTorch's norms of the CPU then give a contiguous one.
inline bool is_channels_last(const at::Tensor& x) {
  return x.suggest_memory_format() != at::MemoryFormat::Contiguous && (x.is_cuda() || !x.is_contiguous());
}

// Of the position in a pool's window.
inline at::ScalarType position_type(at::IntArrayRef kernel) { return position_type(kernel[0] * kernel[1]); }

struct BatchNormArgs {
  OptTensor weight, bias, running_mean, running_var;
  bool training;
  double momentum, eps;
};

// act(batch_norm(input) + other), with the mean and inverse deviation that it used (acc_type) and, with keep_mask, the
// activation's bits (one_bit activations; else empty). Updates the running statistics in training. input: dense or not,
// dtype f32/f64/bf16/f16; the output is dense, channels_last where input is_channels_last(). other: input's sizes and
// dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_forward(const at::Tensor& input,
                                                                        const BatchNormArgs& bn, const OptTensor& other,
                                                                        const Act& act, bool keep_mask);

// The same from statistics that norm_forward() returned. `spare`: memory that may become the output (of `other`).
at::Tensor norm_apply(const at::Tensor& input, const OptTensor& weight, const OptTensor& bias, const at::Tensor& mean,
                      const at::Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& spare);

// Gradients of input, weight, bias (the latter two in acc_type) and of the pre-activation (for `other`), as asked for
// by `want`. input: needed in training, for the weight's gradient, and to recompute the activation where there is no
// mask.
struct NormBackward {
  at::Tensor grad;
  OptTensor input, weight, bias;
  at::Tensor mean, invstd;
  OptTensor other, mask;
  bool training, channels_last;
  bool overwrite_grad = false;  // grad's memory may be taken for a result
  double eps = 0;               // differentiable_norm_backward() reads it, and these dtypes
  at::ScalarType weight_dtype = at::kFloat, bias_dtype = at::kFloat;
};
std::array<at::Tensor, 4> norm_backward(const NormBackward& b, const Act& act, std::array<bool, 4> want);

// The gradient before an activation of which b has the bits, whose derivative is a factor that depends on nothing else:
// it can be differentiated again.
at::Tensor gradient_before_masked(const NormBackward& b, const Act& act);

// All of them under create_graph: gradients that can be differentiated again, those of weight and bias in their dtypes.
std::array<at::Tensor, 4> differentiable_norm_backward(const NormBackward& b, const Act& act, std::array<bool, 4> want);

// The weight of a norm, or ones where there is a bias alone: PyTorch's second derivatives forget the bias then.
OptTensor weight_beside(const OptTensor& weight, const OptTensor& bias);

// The same by PyTorch's operators, for gradients that are differentiated again. mean, invstd: the statistics of an
// evaluation, which in training are not read.
at::Tensor norm_by_pytorch(const at::Tensor& input, const OptTensor& weight, const OptTensor& bias,
                           const at::Tensor& mean, const at::Tensor& invstd, bool training, double eps,
                           const OptTensor& other, const Act& act);

// Whether our kernels take these operands; else PyTorch's ops are composed, which also raise their own errors.
bool norm_usable(const at::Tensor& input, const BatchNormArgs& bn, const OptTensor& other, const Act& act);

// The same for an input that is still to be made: `like` has its dtype and device, `channels` are its size(1).
bool norm_usable(const at::Tensor& like, const c10::SymInt& channels, const BatchNormArgs& bn, const Act& act);

// at::batch_norm
at::Tensor aten_norm(const at::Tensor& input, const BatchNormArgs& bn, bool cudnn_enabled);

// act(group_norm(input)), with the mean and inverse deviation of each image's groups ([N * groups], acc_type). input:
// [N, C, *], at least one element, dtype f32/f64/bf16/f16; C is a multiple of groups. The output is dense, in
// group_format(input).
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_forward(const at::Tensor& input, const OptTensor& weight,
                                                                  const OptTensor& bias, int64_t groups, double eps,
                                                                  const Act& act);

// The same from statistics that group_norm_forward() returned. `spare`: memory that may become the output.
at::Tensor group_norm_apply(const at::Tensor& input, const OptTensor& weight, const OptTensor& bias,
                            const at::Tensor& mean, const at::Tensor& invstd, const Act& act, const OptTensor& spare);

// Gradients of input, and of weight and bias (in acc_type), as asked for by `want`. overwrite: grad's memory may be
// taken for the input's.
std::array<at::Tensor, 3> group_norm_backward(const at::Tensor& grad, const at::Tensor& input, const OptTensor& weight,
                                              const OptTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                                              const Act& act, std::array<bool, 3> want, bool overwrite);

// The layout in which aten::group_norm calls its kernel: channels_last is for the CPU, and for devices of others
// (group_norm.cpp).
inline at::MemoryFormat group_format(const at::Tensor& x) {
  const bool any = x.is_cpu() || x.is_meta() || x.is_privateuseone();
  return any ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

// What a norm's backward asks of forward beside the tensors: saved with the node, and with `grad` as far as it is
// known.
void save_norm(torch::autograd::AutogradContext* ctx, const BatchNormArgs& bn, bool channels_last);
NormBackward saved_norm(torch::autograd::AutogradContext* ctx, const at::Tensor& grad);

// A parameter that was kept, or, where it was not, anything for it: the gradients that are wanted don't depend on it.
// like: of its sizes.
at::Tensor kept_or_any(const OptTensor& kept, bool wanted, const at::Tensor& like, at::ScalarType dtype);

// Counts the tensors that autograd sees among a Function's arguments, in order; -1 where there is none.
struct Edges {
  int64_t next = 0;
  int64_t of(const at::Tensor& t) { return t.defined() ? next++ : -1; }
  int64_t of(const OptTensor& t) { return t && t->defined() ? next++ : -1; }
};

// In backward: which gradients are asked for, of the arguments whose edges forward has saved as "edges".
template <size_t n>
std::array<bool, n> wanted(torch::autograd::AutogradContext* ctx) {
  const auto edges = ctx->saved_data["edges"].toIntVector();
  std::array<bool, n> want;
  for (size_t i = 0; i < n; ++i) want[i] = edges[i] >= 0 && ctx->needs_input_grad(edges[i]);
  return want;
}

// A parameter's dtype among what a node saves, and its gradient in that dtype. Without a parameter there is no
// gradient.
int64_t dtype_of(const OptTensor& t);
at::Tensor in_dtype(const at::Tensor& grad, const at::IValue& dtype);

// The sum of grad * x over the dimensions that `sizes` broadcasts to x's, without the product: for scales of channels
// or of the last dimension, tensors dense in one format and no double backward; else nothing. In mul_act.cpp.
std::optional<at::Tensor> sum_of_product(const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef sizes);

// act(batch_norm(input)).
at::Tensor batch_norm_act(const at::Tensor& input, const BatchNormArgs& bn, bool cudnn_enabled, const Act& act,
                          RecomputeArgument recompute);

// The operator tsmem::group_norm. In layer_norm.cpp.
at::Tensor group_norm(const at::Tensor& input, int64_t groups, const OptTensor& weight, const OptTensor& bias,
                      double eps, bool cudnn_enabled, RecomputeArgument recompute);

inline bool wants_grad(const OptTensor& t) { return t && t->defined() && t->requires_grad(); }

}  // namespace tsmem
