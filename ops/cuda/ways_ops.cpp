// tsmem::_ways: which of two ways is taken, for each shape that was seen so far (trial.h).
#include "cuda/raw_ops.h"
#include "cuda/trial.h"

namespace tsmem::cuda {
namespace {

std::vector<std::string> ways(const at::Tensor&) {
  Trials& all = trials();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> lines;
  for (const auto& [key, trial] : all.found) lines.push_back(trial.name + ": " + trial.said());
  return lines;
}

}  // namespace

void implement_ways(torch::Library& m) { m.impl("_ways", TORCH_FN(ways)); }

}  // namespace tsmem::cuda
