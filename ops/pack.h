// Bytes that are small numbers, in the few bits that each of them needs.
#pragma once
#include <ATen/ATen.h>

namespace tsmem {

// The bits, 1, 2, 4 or 8, that each of that many different numbers needs.
int bits_for(int64_t numbers);

// The elements of `bytes` (a byte or a boolean each, below 2^bits) in `bits` bits: neighbours in memory share a byte,
// the first has the lowest bits. bytes: dense, on the CPU, or without memory.
at::Tensor pack(const at::Tensor& bytes, int bits);

// The same elements again, in a dense tensor of the sizes, strides and dtype (a byte or a boolean) that pack() was
// given.
at::Tensor unpack(const at::Tensor& packed, int bits, at::IntArrayRef sizes, at::IntArrayRef strides,
                  at::ScalarType dtype);

}  // namespace tsmem
