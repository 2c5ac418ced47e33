// How TorchScript runs a model while it is measured.
#pragma once
#include <torch/csrc/jit/runtime/graph_executor.h>

namespace tsmem {

// As long as this lives: what runs eagerly outside, a program of torch.export or a graph of torch.compile, is run as it
// is written. What TorchScript differentiates by itself saves other tensors than eager PyTorch.
inline torch::jit::GraphOptimizerEnabledGuard as_it_runs(bool eagerly) {
  return torch::jit::GraphOptimizerEnabledGuard(!eagerly && torch::jit::getGraphExecutorOptimize());
}

}  // namespace tsmem
