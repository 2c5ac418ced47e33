// What a caller of a graph sees of its values.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <unordered_set>

namespace tsmem {

// The values that a result, an attribute, an argument's memory or code that can't be looked into is made from.
// TorchScript drops none of them. It lets others stay too: a write by way of a list or of a second view is not followed
// here.
std::unordered_set<const torch::jit::Value*> observed_values(torch::jit::Graph& graph);

}  // namespace tsmem
