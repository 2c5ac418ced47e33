#include "generator.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "act.h"
#include "common.h"

namespace tsmem {

using at::Tensor;

namespace {

// Leaves `shared` where `own`, a copy that has drawn, is. Setting a CUDA generator's state would make cuDNN's RNNs draw
// their dropout's state anew, so its counter is moved as by a draw.
void follow(at::Generator& shared, const at::Generator& own, const Tensor& x) {
  if (!x.is_cuda()) return shared.set_state(own.get_state());
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_move_counter", "").typed<void(const Tensor&, int64_t)>();
  op.call(x, static_cast<int64_t>(own.get_offset() - shared.get_offset()));
}

}  // namespace

Tensor draw_by_copy(const Tensor& x, const std::function<void(const at::Generator&)>& f) {
  at::Generator shared = at::globalContext().defaultGenerator(x.device());
  std::lock_guard<std::mutex> lock(shared.mutex());
  const at::Generator own = shared.clone();
  Tensor state = own.get_state();
  f(own);
  follow(shared, own, x);
  return state;
}

at::Generator generator_at(const Tensor& state, at::Device device) {
  at::Generator own = at::globalContext().defaultGenerator(device).clone();
  own.set_state(state);
  return own;
}

bool draws_again(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_move_counter", "");
  if (x.key_set().has(c10::DispatchKey::Python)) return false;
  return x.is_cpu() || (x.is_cuda() && graph_offset(x) < 0 && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA));
}

Tensor pack_positive(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::_act_mask", "")
                             .typed<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, double, double)>();
  return std::get<1>(op.call(x, static_cast<int64_t>(ActKind::relu), 0, 0));
}

Tensor unpack_positive(const Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides,
                       const at::TensorOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tsmem::_act_mask_backward", "")
          .typed<Tensor(const Tensor&, const Tensor&, int64_t, double, double, at::IntArrayRef, const OptTensor&)>();
  const Tensor ones = at::empty_strided(sizes, strides, options).fill_(1);
  return op.call(ones, bits, static_cast<int64_t>(ActKind::relu), 0, 0, strides, ones);
}

}  // namespace tsmem
