// What else the rewriter offers to this library alone.
#pragma once
#include "tsmem/rewrite.h"

namespace tsmem {

// The values of a site's attribute (ops/recompute.h). Made again: anew by each that needs it, which is what plans count
// on. Kept: by the same op, which may make its input again; 0 would leave some activations to stock's, which keep
// theirs.
constexpr int64_t kEachTime = 2, kKept = -1;

// Makes `method` a call of its body, which becomes `_tsmem_amp_<method>`, under autocast to "bf16" or "f16"; the
// original is kept as rewrite() does. Throws Error(ErrorKind::request) where there is no such method, or an autocast
// block in it.
void write_autocast(torch::jit::Module& module, const std::string& method, const std::string& dtype);

// "bf16" or "f16" where write_autocast() has changed the method, else "".
std::string autocast_of(const torch::jit::Module& module, const std::string& method);

// The module at a path ("layer1.0"; "" for the root).
torch::jit::Module submodule(torch::jit::Module m, const std::string& path);

// Distinct classes of the module tree with the path of their first instance ("" for the root), parents first.
struct ModuleClass {
  c10::ClassTypePtr type;
  std::vector<std::string> paths;  // every instance's
};
std::vector<ModuleClass> module_classes(const torch::jit::Module& module);

}  // namespace tsmem
