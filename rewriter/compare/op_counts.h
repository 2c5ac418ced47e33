// Which operators one method has that another has not, with what they call.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <map>
#include <set>
#include <string>

namespace tsmem {

struct OpDifference {
  std::map<std::string, int> removed, added;  // "aten::relu_" -> how many fewer or more
  std::set<std::string> on_tensors;           // operators of either that have a tensor among their results
};

// Null: no operators. Of calls that only one has, the contents count: a call that was replaced by the operators that it
// makes is no change.
OpDifference op_difference(const torch::jit::Graph* a, const torch::jit::Graph* b);

// The same of all that they call, at any depth.
OpDifference total_op_difference(const torch::jit::Graph* a, const torch::jit::Graph* b);

}  // namespace tsmem
