// The peak of a step at other batch sizes, from its bytes at two.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <vector>

#include "rewriter/plan/metered_step.h"

namespace tsmem {

// Between two batches and beyond them the bytes in each slot are taken to grow in proportion.
struct Batches {
  int64_t batch = 0;                // the first of the two
  std::vector<double> fixed, each;  // of each slot: bytes, and bytes for every element of the batch

  int64_t peak(int64_t batch) const;
  // The largest batch whose peak is at most `bytes`; 0: none.
  int64_t largest(int64_t bytes) const;
};

Batches batches_through(int64_t batch, const StepMemory& needed, int64_t other_batch, const StepMemory& other_needed);

// The batch of some inputs: dimension 0 of the first tensor. Throws Error(ErrorKind::input) where there is none.
int64_t batch_of(const std::vector<c10::IValue>& inputs);

// The inputs with a batch of another size in every tensor that has the first one's.
std::vector<c10::IValue> with_batch(const std::vector<c10::IValue>& inputs, int64_t batch);

}  // namespace tsmem
