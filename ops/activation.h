// Activations of tensors: by their names in schemas, by PyTorch's own operators, and among what an autograd node saves.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "act.h"

namespace tsmem {

// relu6 is hardtanh(0, 6). Throws c10::ValueError for an unknown name or a wrong number of arguments.
Act parse_act(c10::string_view name, at::ArrayRef<double> args);

// The operator tsmem::act.
at::Tensor act(const at::Tensor& self, c10::string_view name, at::ArrayRef<double> args, int64_t recompute,
               bool in_place);

// PyTorch's own operator of an activation (differentiable), for dtypes and devices without a kernel of ours.
at::Tensor aten_act(const at::Tensor& x, const Act& act);

// PyTorch's own derivative of a smooth activation (ActSaves::input). `own`: memory that may become the result, or
// undefined.
at::Tensor aten_act_backward(const at::Tensor& grad, const at::Tensor& x, const Act& act, at::Tensor own);

// True where autocast around us would change the dtype of aten_act().
bool autocast_casts(const at::Tensor& x, const Act& act);

// In forward, and in backward.
void save_act(torch::autograd::AutogradContext* ctx, const Act& act);
Act saved_act(torch::autograd::AutogradContext* ctx);

}  // namespace tsmem
