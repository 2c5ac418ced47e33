// Which tensors of a forward pass backward needs, measured.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <vector>

#include "rewriter/stays/saved_tensors.h"
#include "tsmem/profile.h"

namespace tsmem {

// Runs forward once, of a module that has not run yet: from its second call on its operators may have forgotten where
// they come from. Its state is put back.
std::vector<SavedTensor> saved_tensors_of_step(torch::jit::Module& module, const std::vector<c10::IValue>& inputs,
                                               const StepOptions& options);

}  // namespace tsmem
