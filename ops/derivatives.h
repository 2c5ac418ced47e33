// The derivatives of the cheap operators (cheap_table.h) whose backward reads an operand or the result.
#pragma once
#include <ATen/ATen.h>

#include <string_view>
#include <vector>

namespace tsmem {

// What the backward of one call is given. `values`: the operands in order, then the result; undefined where no wanted
// gradient reads it. `arguments`: the call's, with nothing in the place of tensors.
struct BackwardCall {
  at::Tensor grad;
  std::vector<at::Tensor> values;
  const std::vector<at::IValue>& arguments;
  at::IntArrayRef sizes;  // of the first operand

  const at::Tensor& operator[](size_t i) const { return values[i]; }
  const at::Tensor& result() const { return values.back(); }
  at::Scalar number(size_t i) const { return arguments[i].toScalar(); }
};

// One operand's: what it reads (bit i: value i; kResult), and the gradient before it is summed to the operand's sizes.
// No `of`: the operand has no gradient of its own (an index, a mask).
inline constexpr unsigned kResult = 1u << 31;
struct OperandDerivative {
  unsigned reads = 0;
  at::Tensor (*of)(const BackwardCall&) = nullptr;
};

struct Derivative {
  std::string_view op;  // "div.Tensor"
  std::vector<OperandDerivative> operands;
  // Whether these arguments are among what the formulas are for; null: all are.
  bool (*takes)(const std::vector<at::IValue>& arguments) = nullptr;
  // The gradients of all operands that are wanted by one kernel, in place of each operand's `of`.
  std::vector<at::Tensor> (*together)(const BackwardCall&, const std::vector<bool>& wanted) = nullptr;
};

// Null for an operator whose own backward reads nothing but sizes, indices and masks.
const Derivative* derivative_of(std::string_view op);

}  // namespace tsmem
