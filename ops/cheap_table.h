// Operators of PyTorch that are cheap to run again: elementwise ones, casts, copies and look-ups. Each has a namesake
// here with the same arguments, whose output backward can make from its operands (ops/cheap_ops.cpp).
//
// A row is an operator's schema as PyTorch has it, without the last arguments: `int recompute=0` and, where PyTorch has
// a form that overwrites the first operand, `int in_place=0`.
#pragma once
#include <cstddef>
#include <string_view>

namespace tsmem {

// What TorchScript's own autocast casts to float32 (torch/csrc/jit/passes/autocast.cpp). Eager mode's lists are asked
// for at run time.
enum class Scripted { as_it_is, float32 };

// When a rewrite gains: `fed`: only where an operand is kept anyway or recomputed itself. `always`: the output may be
// larger than what it is made from.
enum class Worth { fed, always };

struct CheapOp {
  std::string_view schema;  // "sub.Tensor(Tensor self, …) -> Tensor"
  bool in_place = false;    // PyTorch has sub_ too
  Scripted scripted = Scripted::as_it_is;
  Worth worth = Worth::fed;
  bool offers = true;       // false: the output is small, or takes long to recompute
  bool by_element = false;  // an element of the output depends on the same element of each operand
  bool slow = false;        // its result is kept where its operand takes a cheap layer to be made again

  constexpr std::string_view full_name() const { return schema.substr(0, schema.find('(')); }
  constexpr std::string_view name() const { return full_name().substr(0, full_name().find('.')); }
  constexpr std::string_view overload() const {
    const size_t dot = full_name().find('.');
    return dot == full_name().npos ? std::string_view() : full_name().substr(dot + 1);
  }
  constexpr size_t arguments() const {
    size_t count = 0, brackets = 0;
    const std::string_view list = schema.substr(full_name().size() + 1, schema.find(") ->") - full_name().size() - 1);
    for (const char c : list) {
      brackets += (c == '[' || c == '(') ? 1 : 0;
      brackets -= (c == ']' || c == ')') ? 1 : 0;
      count += c == ',' && brackets == 0;
    }
    return list.empty() ? 0 : count + 1;
  }
};

constexpr CheapOp elementwise(std::string_view schema) { return {.schema = schema, .by_element = true}; }
// Elementwise, and PyTorch has a form that overwrites.
constexpr CheapOp in_place(std::string_view schema, Scripted scripted = Scripted::as_it_is) {
  return {.schema = schema, .in_place = true, .scripted = scripted, .by_element = true};
}
constexpr CheapOp copy(std::string_view schema, bool in_place = false) {
  return {.schema = schema, .in_place = in_place};
}
constexpr CheapOp lookup(std::string_view schema) { return {.schema = schema, .worth = Worth::always}; }
constexpr CheapOp kept(std::string_view schema) { return {.schema = schema, .offers = false}; }

inline constexpr CheapOp kCheapOps[] = {
    // One operand.
    in_place("abs(Tensor self) -> Tensor"),
    in_place("neg(Tensor self) -> Tensor"),
    in_place("sqrt(Tensor self) -> Tensor"),
    in_place("rsqrt(Tensor self) -> Tensor", Scripted::float32),
    in_place("square(Tensor self) -> Tensor"),
    in_place("reciprocal(Tensor self) -> Tensor", Scripted::float32),
    in_place("exp(Tensor self) -> Tensor", Scripted::float32),
    in_place("exp2(Tensor self) -> Tensor"),
    in_place("expm1(Tensor self) -> Tensor", Scripted::float32),
    in_place("log(Tensor self) -> Tensor", Scripted::float32),
    in_place("log2(Tensor self) -> Tensor", Scripted::float32),
    in_place("log10(Tensor self) -> Tensor", Scripted::float32),
    in_place("log1p(Tensor self) -> Tensor", Scripted::float32),
    in_place("sin(Tensor self) -> Tensor"),
    in_place("cos(Tensor self) -> Tensor"),
    in_place("atan(Tensor self) -> Tensor"),
    in_place("sinc(Tensor self) -> Tensor"),
    in_place("erf(Tensor self) -> Tensor"),
    in_place("erfc(Tensor self) -> Tensor"),
    in_place("tan(Tensor self) -> Tensor", Scripted::float32),
    in_place("sinh(Tensor self) -> Tensor", Scripted::float32),
    in_place("cosh(Tensor self) -> Tensor", Scripted::float32),
    in_place("sigmoid(Tensor self) -> Tensor"),
    {.schema = "tanh(Tensor self) -> Tensor", .in_place = true, .by_element = true, .slow = true},
    in_place("nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"),
    // With a number, or two operands. (Sums and products of two are in add_mul_cat.cpp.)
    in_place("add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor", Scripted::float32),
    in_place("sub.Tensor(Tensor self, Tensor other, Scalar alpha=1) -> Tensor", Scripted::float32),
    in_place("sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor", Scripted::float32),
    elementwise("rsub.Tensor(Tensor self, Tensor other, Scalar alpha=1) -> Tensor"),
    elementwise("rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"),
    in_place("mul.Scalar(Tensor self, Scalar other) -> Tensor", Scripted::float32),
    in_place("div.Tensor(Tensor self, Tensor other) -> Tensor", Scripted::float32),
    in_place("div.Scalar(Tensor self, Scalar other) -> Tensor", Scripted::float32),
    in_place("pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor", Scripted::float32),
    in_place("pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor", Scripted::float32),
    // A number is never written to; one list of arguments for all three.
    in_place("pow.Scalar(Scalar self, Tensor exponent) -> Tensor", Scripted::float32),
    in_place("fmod.Scalar(Tensor self, Scalar other) -> Tensor"),
    in_place("remainder.Scalar(Tensor self, Scalar other) -> Tensor"),
    in_place("clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"),
    in_place("clamp_min(Tensor self, Scalar min) -> Tensor"),
    in_place("clamp_max(Tensor self, Scalar max) -> Tensor"),
    elementwise("minimum(Tensor self, Tensor other) -> Tensor"),
    elementwise("maximum(Tensor self, Tensor other) -> Tensor"),
    elementwise("min.other(Tensor self, Tensor other) -> Tensor"),
    elementwise("max.other(Tensor self, Tensor other) -> Tensor"),
    in_place("addcmul(Tensor self, Tensor tensor1, Tensor tensor2, Scalar value=1) -> Tensor"),
    in_place("addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, Scalar value=1) -> Tensor"),
    in_place("lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor"),
    in_place("lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor"),
    in_place("atan2(Tensor self, Tensor other) -> Tensor"),
    in_place("hypot(Tensor self, Tensor other) -> Tensor"),
    elementwise("logaddexp(Tensor self, Tensor other) -> Tensor"),
    elementwise("logaddexp2(Tensor self, Tensor other) -> Tensor"),
    elementwise("log_sigmoid(Tensor self) -> Tensor"),
    elementwise("hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"),
    elementwise("softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"),
    // Chosen by a mask.
    elementwise("where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"),
    elementwise("where.ScalarSelf(Tensor condition, Scalar self, Tensor other) -> Tensor"),
    elementwise("where.ScalarOther(Tensor condition, Tensor self, Scalar other) -> Tensor"),
    in_place("masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"),
    in_place("masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor"),
    copy("tril(Tensor self, int diagonal=0) -> Tensor", true),
    copy("triu(Tensor self, int diagonal=0) -> Tensor", true),
    // Casts and copies.
    copy("to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat? "
         "memory_format=None) -> Tensor(a)"),
    copy("_to_copy(Tensor self, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? "
         "pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor"),
    copy("type_as(Tensor(a) self, Tensor other) -> Tensor(a)"),
    copy("clone(Tensor self, MemoryFormat? memory_format=None) -> Tensor"),
    copy("flip(Tensor self, int[] dims) -> Tensor"),
    copy("rot90(Tensor self, int k=1, int[] dims=[0,1]) -> Tensor"),
    copy("stack(Tensor[] tensors, int dim=0) -> Tensor"),
    copy("hstack(Tensor[] tensors) -> Tensor"),
    copy("vstack(Tensor[] tensors) -> Tensor"),
    copy("dstack(Tensor[] tensors) -> Tensor"),
    copy("column_stack(Tensor[] tensors) -> Tensor"),
    lookup("tile(Tensor self, int[] dims) -> Tensor"),
    lookup("repeat(Tensor self, int[] repeats) -> Tensor"),
    lookup("repeat_interleave.self_int(Tensor self, int repeats, int? dim=None, int? output_size=None) -> Tensor"),
    copy("pixel_shuffle(Tensor self, int upscale_factor) -> Tensor"),
    copy("pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor"),
    copy("constant_pad_nd(Tensor self, int[] pad, Scalar? value=None) -> Tensor"),
    lookup("im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor"),
    // Look-ups.
    lookup("index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"),
    // A list literal of saved code.
    lookup("index.Tensor_hacked_twin(Tensor self, Tensor[] indices) -> Tensor"),
    lookup("index_select(Tensor self, int dim, Tensor index) -> Tensor"),
    lookup("gather(Tensor self, int dim, Tensor index, bool sparse_grad=False) -> Tensor"),
    lookup("embedding(Tensor weight, Tensor indices, int padding_idx=-1, bool scale_grad_by_freq=False, bool "
           "sparse=False) -> Tensor"),
    lookup("upsample_nearest1d.vec(Tensor input, int[]? output_size, float[]? scale_factors) -> Tensor"),
    lookup("upsample_nearest2d.vec(Tensor input, int[]? output_size, float[]? scale_factors) -> Tensor"),
    lookup("upsample_nearest3d.vec(Tensor input, int[]? output_size, float[]? scale_factors) -> Tensor"),
    lookup("upsample_linear1d.vec(Tensor input, int[]? output_size, bool align_corners, float[]? scale_factors) -> "
           "Tensor"),
    lookup("upsample_bilinear2d.vec(Tensor input, int[]? output_size, bool align_corners, float[]? scale_factors) -> "
           "Tensor"),
    lookup("upsample_bicubic2d.vec(Tensor input, int[]? output_size, bool align_corners, float[]? scale_factors) -> "
           "Tensor"),
    lookup("upsample_trilinear3d.vec(Tensor input, int[]? output_size, bool align_corners, float[]? scale_factors) -> "
           "Tensor"),
    // Not made again itself: in a chain, a flow that is warped by itself, all of it would run again for each.
    kept("grid_sampler(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) "
         "-> Tensor"),
    // Reductions, whose outputs are small: they keep their operand, or what it is made from.
    kept("amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"),
    kept("amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"),
    kept("var.dim(Tensor self, int[1]? dim, bool unbiased=True, bool keepdim=False) -> Tensor"),
    kept("var.correction(Tensor self, int[1]? dim=None, Scalar? correction=None, bool keepdim=False) -> Tensor"),
    kept("std.dim(Tensor self, int[1]? dim, bool unbiased=True, bool keepdim=False) -> Tensor"),
    kept("std.correction(Tensor self, int[1]? dim=None, Scalar? correction=None, bool keepdim=False) -> Tensor"),
    kept("norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor"),
    kept("linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, ScalarType? "
         "dtype=None) -> Tensor"),
};

}  // namespace tsmem
