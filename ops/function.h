// What the ops' autograd functions have in common.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <functional>

namespace tsmem {

using Gradients = torch::autograd::variable_list;

// `f` of the gradients where none is batched. Of batched ones (torch.autograd.grad(..., is_grads_batched=True),
// torch.func.vmap over torch.autograd.grad) f of each of the batch, put together again: kernels have no batching rules,
// and what is written in place has no room for a batch. f runs outside of torch.func's transforms, but of jvp's.
Gradients one_at_a_time(const Gradients& grads, const std::function<Gradients(const Gradients&)>& f);

// In gradients(): whether nobody reads after it what the node keeps. The graph goes with this pass, and no other
// gradient of a batch waits.
bool last_reader();

// T has forward() as torch::autograd::Function asks, and gradients() in backward()'s place, which gets no batched ones:
// of a batch it is called for each.
template <class T>
struct Function : torch::autograd::Function<T> {
  static Gradients backward(torch::autograd::AutogradContext* ctx, const Gradients& grads) {
    return one_at_a_time(grads, [ctx](const Gradients& each) { return T::gradients(ctx, each); });
  }
};

}  // namespace tsmem
