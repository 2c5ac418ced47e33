#include "rewriter/method_call.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>

#include "ops/traits.h"

namespace tsmem {

using namespace torch::jit;

Function* called_function(const Node* n) {
  if (n->kind() != prim::CallFunction) return nullptr;
  const auto type = n->input(0)->type()->cast<FunctionType>();
  return type ? type->function() : nullptr;
}

Function* called_method(const Node* n) {
  if (n->kind() != prim::CallMethod) return nullptr;
  const auto type = n->input(0)->type()->cast<ClassType>();
  return type ? type->findMethod(n->s(attr::name)) : nullptr;
}

bool calls_method(std::string_view op) { return traits_of(op).calls_method; }

Function* method_called_by_op(const Node* n) {
  if (!calls_method(n->kind().toQualString())) return nullptr;
  const auto type = n->input(0)->type()->cast<ClassType>();
  const auto name = toIValue(n->input(1));
  return type && name ? type->findMethod(name->toStringRef()) : nullptr;
}

const Graph* graph_of(Function* f) {
  const auto g = f ? tryToGraphFunction(*f) : nullptr;
  return g ? g->graph().get() : nullptr;
}

Value* insert_method_call(Graph& g, const char* op, Value* self, const std::string& method,
                          at::ArrayRef<Value*> arguments, const std::vector<std::string>& more,
                          const c10::TypePtr& type) {
  std::vector<Value*> inputs{self, g.insertConstant(method), g.insertNode(g.createTuple(arguments))->output()};
  for (const std::string& m : more) inputs.push_back(g.insertConstant(m));
  Node* call = g.insertNode(g.create(Symbol::fromQualString(op), inputs, 1));
  call->output()->setType(AnyType::get());
  Value* cast = g.insertNode(g.create(prim::unchecked_cast, {call->output()}, 1))->output();
  cast->setType(type);
  return cast;
}

}  // namespace tsmem
