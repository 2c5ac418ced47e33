// Differences summed up.
#pragma once
#include "tsmem/diff.h"

namespace tsmem {

// Of a method of both models with all that it calls: removed_ops, added_ops and status alone.
MethodDiff total_difference(const torch::jit::Module& a, const torch::jit::Module& b, const std::string& method);

// The operators on tensors that went and came, with how many; all of them where no other changed.
struct ChangedOps {
  std::map<std::string, int> removed, added;
};
ChangedOps changed_ops(const MethodDiff& d);

}  // namespace tsmem
