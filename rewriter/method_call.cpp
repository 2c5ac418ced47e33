#include "rewriter/method_call.h"

namespace tsmem {

using namespace torch::jit;

bool calls_method(std::string_view op) { return op == "tsmem::checkpoint" || op == "tsmem::autocast"; }

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
