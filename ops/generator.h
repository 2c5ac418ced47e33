// Draws from the default generator that backward can repeat: by way of a copy, so that no other thread's draw can come
// between the state that is kept and what is drawn.
#pragma once
#include <ATen/ATen.h>

#include <functional>

namespace tsmem {

// Runs f with a copy of the default generator of x's device, and leaves the default one where the copy is then. Returns
// the state before.
at::Tensor draw_by_copy(const at::Tensor& x, const std::function<void(const at::Generator&)>& f);

// A generator for that device in a state that draw_by_copy() returned.
at::Generator generator_at(const at::Tensor& state, at::Device device);

// Whether draws for x can be repeated: those of real tensors on the CPU, and on CUDA outside the capture of a graph,
// whose replays move the counter.
bool draws_again(const at::Tensor& x);

// Where x > 0 or is NaN, a bit an element in the order of memory; and a tensor of such sizes and strides that is 1
// there and 0 elsewhere.
at::Tensor pack_positive(const at::Tensor& x);
at::Tensor unpack_positive(const at::Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides,
                           const at::TensorOptions& options);

}  // namespace tsmem
