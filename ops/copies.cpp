// Copies in another order of the same elements, which can be recomputed in backward: contiguous, reshape, flatten,
// roll. They keep nothing, as PyTorch's. All but roll return views where PyTorch's do.
//
// vmap refuses operators whose schema says so before it looks inside: those are registered for it by themselves.

#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

template <class F>
Tensor offered(const Tensor& x, RecomputeArgument recompute, F f) {
  const Tensor out = f(x);
  if (needs_grad(x) && plain(x) && !out.is_alias_of(x))
    offer(
        out, {x}, [f](std::vector<Tensor>& from, const std::vector<bool>&) { return f(from[0]); }, recompute);
  return out;
}

Tensor contiguous(const Tensor& x, at::MemoryFormat format, int64_t recompute) {
  return offered(x, recompute, [format](const Tensor& t) { return t.contiguous(format); });
}

Tensor reshape(const Tensor& x, at::IntArrayRef shape, int64_t recompute) {
  return offered(x, recompute, [shape = shape.vec()](const Tensor& t) { return t.reshape(shape); });
}

Tensor flatten(const Tensor& x, int64_t start, int64_t end, int64_t recompute) {
  return offered(x, recompute, [start, end](const Tensor& t) { return t.flatten(start, end); });
}

Tensor roll(const Tensor& x, at::IntArrayRef shifts, at::IntArrayRef dims, int64_t recompute) {
  return offered(x, recompute,
                 [shifts = shifts.vec(), dims = dims.vec()](const Tensor& t) { return at::roll(t, shifts, dims); });
}

}  // namespace

void register_copies(torch::Library& m) {
  m.def("contiguous(Tensor(a) self, MemoryFormat memory_format=contiguous_format, int recompute=0) -> Tensor(a)",
        TORCH_FN(contiguous));
  m.def("reshape(Tensor(a) self, int[] shape, int recompute=0) -> Tensor(a)", TORCH_FN(reshape));
  m.def("flatten(Tensor(a) self, int start_dim=0, int end_dim=-1, int recompute=0) -> Tensor(a)", TORCH_FN(flatten));
  m.def("roll(Tensor self, int[1] shifts, int[1] dims=[], int recompute=0) -> Tensor", TORCH_FN(roll));
  m.impl("contiguous", c10::DispatchKey::FuncTorchBatched, TORCH_FN(contiguous));
  m.impl("reshape", c10::DispatchKey::FuncTorchBatched, TORCH_FN(reshape));
  m.impl("flatten", c10::DispatchKey::FuncTorchBatched, TORCH_FN(flatten));
}

}  // namespace tsmem
