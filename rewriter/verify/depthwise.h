// Depthwise convolutions in float64 on the CPU at the speed of other convolutions.
#pragma once
#include <torch/library.h>

namespace tsmem {

// While it lives, 2-d depthwise convolutions of float64 tensors on the CPU, and their backward, run in loops of their
// own. PyTorch takes such a convolution apart into one matrix product a channel, which is up to a hundred times slower
// than float32; oneDNN has no float64. Other convolutions run as ever. It holds for the whole process, so nothing else
// may run convolutions on another thread while one is made or goes.
class FastDepthwise {
 public:
  FastDepthwise();
  FastDepthwise(const FastDepthwise&) = delete;
  FastDepthwise& operator=(const FastDepthwise&) = delete;

 private:
  torch::Library library_;
};

}  // namespace tsmem
