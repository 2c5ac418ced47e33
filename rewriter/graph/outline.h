// A flat body as calls of the modules whose code it is.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <unordered_map>

#include "rewriter/graph/module_stack.h"

namespace tsmem {

// The calls that lead to nodes of a flat body, outermost first; none for those of the root itself.
using CallsOf = std::unordered_map<const torch::jit::Node*, std::vector<ModuleCall>>;

// Takes the flat body of `root`'s forward apart into methods: what follows one another in the code of one call of a
// module becomes a method of that module ("forward", then "forward_1"), and is called from where it stood. Nothing
// changes its order. A call of a module that is not there, or not below the one that calls it, stays part of its
// caller.
void outline(torch::jit::Module root, const CallsOf& calls);

}  // namespace tsmem
