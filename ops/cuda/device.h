// Where the host code of the CUDA ops meets the device: which stream, which pointers. Compiled with
// TSMEM_EMULATE_CUDA, the same code works on CPU tensors.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#ifndef TSMEM_EMULATE_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <initializer_list>

#include "act.h"
#include "cpu_dtype.h"
#include "cuda/args.h"

namespace tsmem::cuda {

// While this lives, t's device is the current one; `stream` is the one that PyTorch works on there.
struct OnDevice {
  c10::DeviceGuard guard;
  Stream stream;
#ifdef TSMEM_EMULATE_CUDA
  explicit OnDevice(const at::Tensor& t) : guard(t.device()), stream(nullptr) {}
#else
  explicit OnDevice(const at::Tensor& t) : guard(t.device()), stream(c10::cuda::getCurrentCUDAStream().stream()) {}
#endif
};

// Whether all of these that are defined start at a multiple of 16 bytes.
inline bool aligned(std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& t : tensors)
    if (t.defined() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  return true;
}

inline const void* read(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
inline void* write(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

// An activation as PyTorch's CUDA kernels have its arguments: threshold compares with numbers of the tensor's dtype.
// Emulated, as the CPU's.
inline Act act_for([[maybe_unused]] at::ScalarType dtype, Act act) {
#ifndef TSMEM_EMULATE_CUDA
  if (act.kind == ActKind::threshold)
    for (double* number : {&act.a, &act.b}) {
      if (dtype == at::kHalf) *number = c10::Half(static_cast<float>(*number));
      if (dtype == at::kBFloat16) *number = c10::BFloat16(static_cast<float>(*number));
    }
#endif
  return act;
}

// A vector of parameters, or (written) of running statistics.
inline Numbers numbers(const std::optional<at::Tensor>& t, bool written = false) {
  if (!t || !t->defined()) return {};
  TORCH_CHECK(t->dim() == 1, "tsmem: parameters of a norm have one dimension");
  return {written ? t->mutable_data_ptr() : t->const_data_ptr(), cpu_dtype(t->scalar_type()), t->stride(0)};
}

}  // namespace tsmem::cuda
