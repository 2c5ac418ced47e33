// Helpers that every op shares.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

using OptTensor = std::optional<at::Tensor>;

inline at::Tensor value_or_undefined(const OptTensor& t) { return t ? *t : at::Tensor(); }
inline OptTensor optional(const at::Tensor& t) { return t.defined() ? OptTensor(t) : OptTensor(); }
// Nothing where an undefined tensor stands for nothing.
inline OptTensor defined(const OptTensor& t) { return t ? optional(*t) : OptTensor(); }

// Under autocast TorchScript casts operands by lists of its own, which are not those of eager mode
// (torch/csrc/jit/passes/autocast.cpp): sums, products, layer and group norms, GELU and softplus run in float32 there,
// but for what is written in place. That pass does not know our ops, which are told here what they would have been
// given: t in float32 where it is of half precision and a scripted caller runs under autocast, else t. An autocast that
// is written into the model (ops/autocast.cpp) has eager mode's lists.
at::Tensor as_scripted(const at::Tensor& t);

// Whether as_scripted() would cast a tensor on this device.
bool scripted_autocast(at::DeviceType device);

inline bool low_precision(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}

// Whether this thread's ops follow eager mode's lists under autocast. What sets it puts back what it returns.
bool follows_eager_autocast();
bool follow_eager_autocast(bool whether);

// Whether the columns of the matrices in t are what lies together in memory: the gradient of such a factor does so too.
inline bool by_columns(const at::Tensor& t) { return t.stride(-2) == 1 && t.stride(-1) == t.size(-2); }

// Which operand of a sum or product the original writes to: its dtype, sizes and strides are the result's, and
// TorchScript's autocast leaves the operands alone. A new result has its strides from the operand that the original
// names first, where both have some: in kNewFromSecond that is our second.
enum InPlace : int64_t { kNew = 0, kFirst = 1, kSecond = 2, kNewFromSecond = 3 };

inline bool makes_new(int64_t in_place) { return in_place == kNew || in_place == kNewFromSecond; }

// Whether an op that writes to `target` gives what the op gives that makes a new tensor.
bool same_in_place(const at::Tensor& target, const at::Tensor& other);

// `made`, which nobody else holds yet, with these strides, as an in-place operator would have left its target's. Where
// only dimensions of one element differ no element moves; what picks a memory format later may go by those, too.
// Returns a copy where elements must move, and `made` itself under transforms and modes that track strides on their
// own.
at::Tensor in_strides(const at::Tensor& made, at::IntArrayRef strides);

// `made` from two operands, with the strides of the one that the original overwrites.
at::Tensor in_target_strides(const at::Tensor& made, const at::Tensor& first, const at::Tensor& second,
                             int64_t in_place);

// True where autograd will record: grad mode is on and one of the tensors requires grad.
template <class... T>
bool needs_grad(const T&... t) {
  return at::GradMode::is_enabled() && ((t.defined() && t.requires_grad()) || ...);
}

// True where our autograd functions apply: dense floating-point tensors outside functorch transforms and without a
// forward-mode tangent. Everything else (complex, quantized, sparse, mkldnn, vmap, jvp) takes PyTorch's op, which is
// right by construction.
bool plain(const at::Tensor& x);

// True where nobody but the caller holds t or its memory, and no gradient flows through it: it may be overwritten. Of a
// gradient that a backward got: nobody has asked to keep it.
bool only_ours(const at::Tensor& t);

// True where an internal op of ours (tsmem::_…) has a kernel for x's device, and x one of the four dtypes: f32, f64,
// bf16, f16.
bool has_kernel(const c10::OperatorHandle& op, const at::Tensor& x);

// How far the draws of the CUDA graph that is captured on x's stream have moved the generator's counter; -1: none is
// captured, or there is no CUDA part of this library to ask.
int64_t graph_offset(const at::Tensor& x);

// A tensor with x's sizes, strides and options and no memory behind it, for PyTorch's backward functions that read
// nothing but its shape.
at::Tensor shape_of(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options);
// ... dense, in this format: contiguous or channels_last.
at::Tensor shape_in(at::IntArrayRef sizes, at::MemoryFormat format, const at::TensorOptions& options);

// Sizes [N, C_out, *] (or [C_out, *] for an unbatched input) as at::convolution(input, weight, …) has. Lists have an
// entry, or one a dimension. Source: ATen/native/ConvUtils.h.
std::vector<int64_t> conv_output_size(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                                      at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                      at::IntArrayRef output_padding, int64_t groups);
// The gradient of a batched CUDA input of these sizes that is not at hand, from the gradient of the output: the
// transposed convolution (or the convolution, of a transposed one), by the same kernels. Undefined where it is none,
// and on other devices, where shape_of() takes no memory for what at::convolution_backward wants to see.
at::Tensor conv_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::IntArrayRef input_sizes,
                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                               bool transposed, int64_t groups);

// Under create_graph: gradients that our kernels computed are not differentiable. Passes the defined ones through a
// node whose backward throws "tsmem::<op>: second derivatives are not supported", so that nobody gets silently detached
// gradients. `inputs`: what the gradients depend on (grad_output and saved tensors). Outside create_graph returns
// `grads` as they are.
std::vector<at::Tensor> refuse_double_backward(std::vector<at::Tensor> grads, const char* op, at::TensorList inputs);

// In backward under create_graph: the gradients of f(operands), PyTorch's operators on these, which can be
// differentiated again. One an operand, undefined where `want` is false. An operand that has no place in the graph
// stands for one that its gradient does not depend on.
std::vector<at::Tensor> differentiable_gradients(const std::vector<at::Tensor>& operands, at::ArrayRef<bool> want,
                                                 const at::Tensor& grad,
                                                 const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f);
// The same of several results, whose gradients may be undefined.
std::vector<at::Tensor> differentiable_gradients(
    const std::vector<at::Tensor>& operands, at::ArrayRef<bool> want, const std::vector<at::Tensor>& grads,
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& f);

}  // namespace tsmem
