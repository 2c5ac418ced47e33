// Dropout with PyTorch's draws on a CUDA device and no mask: the noise of an element is a function of its index, a seed
// and a counter (Philox), and is computed where it is needed, in forward and again in backward.
#pragma once
#include "cuda/args.h"
#include "dtype.h"

namespace tsmem::cuda {

// Seed and counter of a draw: numbers, or where they lie on the device. While a CUDA graph is captured PyTorch gives
// where they will lie when it is replayed, and how far the graph has drawn before.
struct Draw {
  uint64_t seed = 0, counter = 0;
  const int64_t* seed_at = nullptr;
  const int64_t* counter_at = nullptr;  // what lies there is added to `counter`
};

// How the kernel of PyTorch spreads elements over threads, on which its draws depend (ATen/native/cuda/Dropout.cu).
struct Spread {
  int64_t blocks = 0;  // of kDropoutThreads
  int group = 1;       // neighbours of a thread, which it draws together: 1, 2, 4 or 8
};
constexpr int64_t kDropoutThreads = 256;

// `multiprocessors` of the device, each with room for `threads`; alignment: of x's memory, in bytes.
Spread dropout_spread(int64_t n, int64_t element_size, int64_t alignment, int64_t multiprocessors, int64_t threads);
// How far the counter moves.
int64_t dropout_counter(int64_t n, const Spread&);

// out = x times the noise over `keep`, the probability to keep an element, for n > 0 elements in the order of memory.
// state, if any: two numbers that become the seed and the counter. aligned: x and out start at multiples of 16 bytes.
void dropout(Dtype, const void* x, void* out, int64_t n, double keep, const Draw&, const Spread&, int64_t* state,
             bool aligned, Stream);

}  // namespace tsmem::cuda
