#include "generator.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "act.h"
#include "common.h"

namespace tsmem {

using at::Tensor;

namespace {

static_assert(std::endian::native == std::endian::little);  // byte k of eight has 2^(8 k) in their number
constexpr uint64_t kEach = 0x0101010101010101, kAllButHighest = 0x7f7f7f7f7f7f7f7f;
constexpr uint64_t kOneOfEach = 0x8040201008040201;  // bit k of byte k
constexpr uint64_t kGather = 0x0102040810204080;     // times eight bytes of 0 or 1: byte k is bit k of the highest byte
constexpr int64_t kBytesAThread = 4096;

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
  return (x.is_cpu() || x.is_cuda()) && !x.key_set().has(c10::DispatchKey::Python) && graph_offset(x) < 0;
}

Tensor pack_booleans(const Tensor& noise) {
  const int64_t count = noise.numel();
  Tensor bits = at::empty({(count + 7) / 8}, noise.options().dtype(at::kByte));
  if (noise.is_meta()) return bits;
  const auto* from = static_cast<const uint8_t*>(noise.const_data_ptr());
  auto* to = bits.mutable_data_ptr<uint8_t>();
  const auto pack = [&](int64_t i, size_t booleans) {
    uint64_t eight = 0;
    std::memcpy(&eight, from + 8 * i, booleans);
    to[i] = static_cast<uint8_t>((eight * kGather) >> 56);
  };
  at::parallel_for(0, count / 8, kBytesAThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack(i, 8);
  });
  if (count % 8 != 0) pack(count / 8, static_cast<size_t>(count % 8));
  return bits;
}

Tensor unpack_booleans(const Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides) {
  Tensor noise = at::empty_strided(sizes, strides, bits.options().dtype(at::kBool));
  if (noise.is_meta()) return noise;
  const int64_t count = noise.numel();
  const auto* from = bits.const_data_ptr<uint8_t>();
  auto* to = static_cast<uint8_t*>(noise.mutable_data_ptr());
  const auto unpack = [&](int64_t i, size_t booleans) {
    // Byte k keeps bit k alone, and becomes 1 where that is set.
    const uint64_t kept = (from[i] * kEach) & kOneOfEach;
    const uint64_t eight = ((kept + kAllButHighest) >> 7) & kEach;
    std::memcpy(to + 8 * i, &eight, booleans);
  };
  at::parallel_for(0, count / 8, kBytesAThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unpack(i, 8);
  });
  if (count % 8 != 0) unpack(count / 8, static_cast<size_t>(count % 8));
  return noise;
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
