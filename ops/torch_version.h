// What differs between the versions of torch that tsmem is built for, 2.11 to 2.15. No other file asks for the version.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>

namespace tsmem {

// Pointers to autograd's nodes. A weak one leaves an intrusive node's memory in place, and nothing that it saved.
#if TORCH_VERSION_MINOR >= 13
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
using WeakNodePtr = c10::weak_intrusive_ptr<torch::autograd::Node>;
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;
#endif

// Whether the gradient of clamp, clamp_min and clamp_max passes where the input is the bound itself (pytorch#191142).
constexpr bool kClampPassesAtBound = TORCH_VERSION_MINOR < 14;

}  // namespace tsmem
