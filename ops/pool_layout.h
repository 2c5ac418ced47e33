// Shapes and layouts of the raw max pooling ops (max_pool.cpp), for every backend: maps are [batch, channels,
// space...].
#pragma once
#include <ATen/ATen.h>

#include <vector>

#include "pack.h"

namespace tsmem {

// Of the position in a window of that many elements.
inline at::ScalarType position_type(int64_t volume) {
  return volume <= 256 ? at::kByte : volume <= 65536 ? at::kUInt16 : at::kUInt32;
}

// In which a position is kept. On a device it stays as it was written.
inline int position_bits(int64_t volume, const at::Tensor& x) {
  const bool packed = (x.is_cpu() || x.is_meta()) && position_type(volume) == at::kByte;
  return packed ? bits_for(volume) : 8;
}

// PyTorch sees a 1-d pool as a 2-d one of height 1, also where it looks for channels_last.
// Its adaptive 3-d pool knows no layout but the contiguous one.
inline at::MemoryFormat format_of(const at::Tensor& x, bool adaptive) {
  if (x.dim() == 5 && adaptive) return at::MemoryFormat::Contiguous;
  return x.dim() == 3 ? x.unsqueeze(2).suggest_memory_format() : x.suggest_memory_format();
}

inline at::MemoryFormat format_for(bool channels_last, size_t dims) {
  if (!channels_last) return at::MemoryFormat::Contiguous;
  return dims == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

// A tensor [batch, channels, space...] in the format that PyTorch gives a pool's output.
inline at::Tensor empty_in(at::IntArrayRef sizes, at::MemoryFormat format, const at::TensorOptions& options) {
  if (sizes.size() > 3) return at::empty(sizes, options, format);
  if (format == at::MemoryFormat::Contiguous) return at::empty(sizes, options);
  return at::empty_strided(sizes, {sizes[1] * sizes[2], 1, sizes[1]}, options);
}

inline at::Tensor contiguous_in(const at::Tensor& x, at::MemoryFormat format) {
  if (x.dim() > 3) return x.contiguous(format);
  return format == at::MemoryFormat::Contiguous ? x.contiguous() : x.transpose(1, 2).contiguous().transpose(1, 2);
}

// The sizes of a pool's output, and of the input that a gradient is of.
inline std::vector<int64_t> with_space(const at::Tensor& x, at::IntArrayRef space) {
  std::vector<int64_t> sizes{x.size(0), x.size(1)};
  sizes.insert(sizes.end(), space.begin(), space.end());
  return sizes;
}

}  // namespace tsmem
