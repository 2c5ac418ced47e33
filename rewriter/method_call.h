// Calls of a module's method by an operator: tsmem::checkpoint, tsmem::autocast.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <string_view>
#include <vector>

namespace tsmem {

// Whether an operator is one of these, in which the operators of a method run.
bool calls_method(std::string_view op);

// Inserts op(self, method, (arguments), more) and returns it as a value of `type`, the method's result type: the
// operator's own is Any.
torch::jit::Value* insert_method_call(torch::jit::Graph& g, const char* op, torch::jit::Value* self,
                                      const std::string& method, at::ArrayRef<torch::jit::Value*> arguments,
                                      const std::vector<std::string>& more, const c10::TypePtr& type);

}  // namespace tsmem
