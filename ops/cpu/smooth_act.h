// Activations whose derivative needs their input, elementwise. Which of them are used: smooth_usable() in act.cpp.
#pragma once
#include "act.h"
#include "cpu/kernels.h"

namespace tsmem {

struct SmoothActKernels {
  // out[i] = act(x[i]); out may be x.
  void (*forward)(Dtype dtype, const Act& act, const void* x, void* out, int64_t n);
  // out[i] = grad[i] * act'(x[i]); out may be x or grad.
  void (*backward)(Dtype dtype, const Act& act, const void* x, const void* grad, void* out, int64_t n);
};

const SmoothActKernels& smooth_act_kernels();

}  // namespace tsmem
