// Calls in a graph: of functions, of methods, and of methods by an operator (tsmem::checkpoint, tsmem::autocast).
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <string_view>
#include <vector>

namespace tsmem {

// What a prim::CallFunction calls; null for other nodes.
torch::jit::Function* called_function(const torch::jit::Node* n);

// What a prim::CallMethod calls; null for other nodes, and where it is not known before run time (an interface).
torch::jit::Function* called_method(const torch::jit::Node* n);

// Whether an operator is one of those, in which the operators of a method run.
bool calls_method(std::string_view op);

// The method that such an operator calls; null for other nodes.
torch::jit::Function* method_called_by_op(const torch::jit::Node* n);

// A function's graph; null where there is no function, or it has none.
const torch::jit::Graph* graph_of(torch::jit::Function* f);

// Inserts op(self, method, (arguments), more) and returns it as a value of `type`, the method's result type: the
// operator's own is Any.
torch::jit::Value* insert_method_call(torch::jit::Graph& g, const char* op, torch::jit::Value* self,
                                      const std::string& method, at::ArrayRef<torch::jit::Value*> arguments,
                                      const std::vector<std::string>& more, const c10::TypePtr& type);

}  // namespace tsmem
