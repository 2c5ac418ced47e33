#include "pack.h"

#include <ATen/Parallel.h>

#include <bit>
#include <cstring>

namespace tsmem {

using at::Tensor;

namespace {

static_assert(std::endian::native == std::endian::little);  // byte k of eight has 2^(8 k) in their number
constexpr int64_t kBytesAThread = 4096;

// The `low` lowest bits of each `width` bits.
constexpr uint64_t lowest(int low, int width) {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += width) mask |= ((low < 64 ? uint64_t{1} << low : 0) - 1) << at;
  return mask;
}

// Eight bytes of `bits` bits each to 8 * bits bits, by halves: neighbours, then pairs, then fours.
template <int bits>
uint64_t gather(uint64_t x) {
  constexpr int gap = 8 - bits;
  x = (x | x >> gap) & lowest(2 * bits, 16);
  x = (x | x >> 2 * gap) & lowest(4 * bits, 32);
  return (x | x >> 4 * gap) & lowest(8 * bits, 64);
}

template <int bits>
uint64_t scatter(uint64_t x) {
  constexpr int gap = 8 - bits;
  x = (x | x << 4 * gap) & lowest(4 * bits, 32);
  x = (x | x << 2 * gap) & lowest(2 * bits, 16);
  return (x | x << gap) & lowest(bits, 8);
}

// Eight elements are `bits` bytes.
template <int bits>
void pack_bytes(const uint8_t* from, uint8_t* to, int64_t count) {
  const auto some = [&](int64_t i, size_t elements, size_t bytes) {
    uint64_t eight = 0;
    std::memcpy(&eight, from + 8 * i, elements);
    const uint64_t packed = gather<bits>(eight);
    std::memcpy(to + bits * i, &packed, bytes);
  };
  at::parallel_for(0, count / 8, kBytesAThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) some(i, 8, bits);
  });
  if (const int64_t rest = count % 8) some(count / 8, rest, (rest * bits + 7) / 8);
}

template <int bits>
void unpack_bytes(const uint8_t* from, uint8_t* to, int64_t count) {
  const auto some = [&](int64_t i, size_t elements, size_t bytes) {
    uint64_t packed = 0;
    std::memcpy(&packed, from + bits * i, bytes);
    const uint64_t eight = scatter<bits>(packed);
    std::memcpy(to + 8 * i, &eight, elements);
  };
  at::parallel_for(0, count / 8, kBytesAThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) some(i, 8, bits);
  });
  if (const int64_t rest = count % 8) some(count / 8, rest, (rest * bits + 7) / 8);
}

bool has_memory(const Tensor& x) { return !x.is_meta() && !x.key_set().has(c10::DispatchKey::Python); }

}  // namespace

int bits_for(int64_t numbers) { return numbers <= 2 ? 1 : numbers <= 4 ? 2 : numbers <= 16 ? 4 : 8; }

Tensor pack(const Tensor& bytes, int bits) {
  if (bits == 8) return bytes;
  Tensor packed = at::empty({(bytes.numel() * bits + 7) / 8}, bytes.options().dtype(at::kByte));
  if (!has_memory(bytes)) return packed;
  const auto* from = static_cast<const uint8_t*>(bytes.const_data_ptr());
  auto* to = packed.mutable_data_ptr<uint8_t>();
  const auto run = bits == 1 ? pack_bytes<1> : bits == 2 ? pack_bytes<2> : pack_bytes<4>;
  run(from, to, bytes.numel());
  return packed;
}

Tensor unpack(const Tensor& packed, int bits, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  if (bits == 8) return packed;
  Tensor bytes = at::empty_strided(sizes, strides, packed.options().dtype(dtype));
  if (!has_memory(packed)) return bytes;
  const auto* from = packed.const_data_ptr<uint8_t>();
  auto* to = static_cast<uint8_t*>(bytes.mutable_data_ptr());
  const auto run = bits == 1 ? unpack_bytes<1> : bits == 2 ? unpack_bytes<2> : unpack_bytes<4>;
  run(from, to, bytes.numel());
  return bytes;
}

}  // namespace tsmem
