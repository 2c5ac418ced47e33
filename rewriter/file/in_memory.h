// Copies of a module that are made without a file.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>

namespace tsmem {

// What saving `module` and loading the file again gives: new types and functions, of which nothing has run, in a
// compilation unit of their own. Weights are copied in memory. `device`: "" for each tensor's own. Throws Error where
// LibTorch can't save or load the module.
torch::jit::Module copy_in_memory(const torch::jit::Module& module, const std::string& device = "");

}  // namespace tsmem
