// A module's state, put back after it has run.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <memory>

namespace tsmem {

// A deep copy of every attribute of a module tree (values and training flags), of its gradients and of the random
// generators; puts them back when it ends. Of parameters there is no copy where `source` is given, a module with the
// same parameters, or these in another dtype: one that was overwritten is put back from there.
class StateGuard {
 public:
  explicit StateGuard(const torch::jit::Module& module, const torch::jit::Module* source = nullptr);
  ~StateGuard();
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tsmem
