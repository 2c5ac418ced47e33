// What the methods of a model write to that outlives a call. A view of one method shows none of what another one does
// between its forward and backward.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <set>
#include <string>
#include <unordered_set>

namespace tsmem {

struct ModelWrites {
  std::unordered_set<const void*> storages;  // of attributes that some method writes to in place, by its own code
  std::set<std::string> set;                 // the names of attributes that methods other than forward give tensors
};

ModelWrites model_writes(const torch::jit::Module& module);

}  // namespace tsmem
