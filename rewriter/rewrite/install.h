// Putting rewritten bodies into a module's methods, and the originals back.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <string>

#include "tsmem/rewrite.h"

namespace tsmem {

// Gives a method another body. Its original is kept as `_tsmem_original_<method>`, once; the Function, its schema and
// everybody who holds it stay.
void install(const c10::ClassTypePtr& type, const std::string& method, const std::shared_ptr<torch::jit::Graph>& body);

// Replaces a graph's body by another's, so that the Function, its schema and everybody who holds it stay.
void replace_body(torch::jit::Graph& graph, torch::jit::Graph& body);

// Throws Error where `method` can't be put under autocast.
void check_autocast(const torch::jit::Module& module, const std::string& method);

// Makes `method` a call of its body, which becomes `_tsmem_amp_<method>`, under autocast to "bf16" or "f16"; the
// original is kept as rewrite() does. Throws Error(ErrorKind::request) where there is no such method, or an autocast
// block in it.
void write_autocast(torch::jit::Module& module, const std::string& method, const std::string& dtype);

// "bf16" or "f16" where write_autocast() has changed the method, else "".
std::string autocast_of(const torch::jit::Module& module, const std::string& method);

}  // namespace tsmem
