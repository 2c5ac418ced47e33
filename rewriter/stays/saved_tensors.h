// Which tensors of a forward pass backward needs, read from its graph.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// A saved tensor, or several of one operator, by what makes it and by the first operator, in forward's order,
// whose backward needs it.
struct SavedTensor {
  std::string op, module, keeper, keeper_module;
  std::optional<int64_t> bytes;  // measured
  bool unknown = false;          // nothing is known of what the operator keeps
};

// Of a method of `module`, where the bodies of the methods that it calls are those that `body_of` gives. Parameters,
// buffers, arguments and statistics of norms don't count. Gradients flow as requires_grad of the parameters says, from
// the arguments where no parameter needs one.
std::vector<SavedTensor> saved_tensors(const torch::jit::Module& module, const Graph& method, const BodyOf& body_of);

// Whether a parameter of the module needs a gradient; where none does, the arguments do.
bool trains(const torch::jit::Module& module);

// The innermost module that holds every parameter and buffer that an operator reads, by its path from the method's own
// module; nullopt where it reads none.
std::optional<std::string> module_of_parameters(const Node* n);

}  // namespace tsmem
