// Dictionaries and lists among a model's attributes, which decide branches: torchvision's IntermediateLayerGetter asks
// a dictionary which layers' results it returns.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <set>
#include <string>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// The names of those that code of the model sets, or does something else with than look into it.
std::set<std::string> changed_containers(const torch::jit::Module& module);

// What all of these instances of a class say of the others.
Contains contains_in(std::vector<torch::jit::Module> instances, std::set<std::string> changed);

}  // namespace tsmem
