#include "rewriter/rewrite/added_names.h"

#include <torch/csrc/jit/api/module.h>

namespace tsmem {

std::vector<std::string> added_methods(const c10::ClassType& type) {
  std::vector<std::string> names;
  for (const torch::jit::Function* f : type.methods())
    if (is_added_name(f->name())) names.push_back(f->name());
  return names;
}

}  // namespace tsmem
