#include "rewriter/rewrite/model_writes.h"

#include <torch/csrc/jit/api/function_impl.h>

#include "rewriter/measure/inputs.h"
#include "rewriter/method_call.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/operators.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// Whether a value may be its node's first input, a view of it, or an element of it.
bool passes_on_first(const Value* v) {
  const Node* n = v->node();
  if (n->inputs().empty()) return false;
  if (n->kind() == aten::__getitem__ || n->kind() == prim::ListUnpack || n->kind() == prim::TupleUnpack ||
      n->kind() == prim::unchecked_cast || n->kind() == prim::unchecked_unwrap_optional)
    return true;
  const FunctionSchema* schema = n->maybeSchema();
  return schema && v->offset() < schema->returns().size() && schema->returns()[v->offset()].alias_info();
}

// The path of the attribute that a value is, or is a part of.
std::optional<std::string> written_attribute(const Value* v) {
  while (v->node()->kind() != prim::GetAttr && passes_on_first(v)) v = v->node()->input(0);
  auto path = attribute_path(v);
  return path && !path->empty() ? path : std::nullopt;
}

void collect(const Block* block, bool forward, std::set<std::string>& written, std::set<std::string>& set) {
  for (const Node* n : block->nodes()) {
    for (const Block* b : n->blocks()) collect(b, forward, written, set);
    if (n->hasAttribute(attr::Subgraph)) collect(n->g(attr::Subgraph)->block(), forward, written, set);
    if (n->kind() == prim::SetAttr && !forward && may_hold_tensor(n->input(1)->type())) set.insert(n->s(attr::name));
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || !schema->is_mutable()) continue;
    for (size_t k = 0; k < schema->arguments().size() && k < n->inputs().size(); ++k)
      if (const auto* alias = schema->arguments()[k].alias_info(); alias && alias->isWrite())
        if (const auto path = written_attribute(n->input(k))) written.insert(*path);
  }
}

}  // namespace

ModelWrites model_writes(const Module& module) {
  ModelWrites all;
  for (const ModuleClass& c : module_classes(module)) {
    std::set<std::string> written;
    for (Function* f : c.type->methods()) {
      const GraphFunction* function = graph_function(f);
      if (!function || is_added_name(f->name())) continue;
      // What forward calls is in the views of those who call forward.
      if (f->name() == "forward") {
        collect(function->graph()->block(), /*forward=*/true, written, all.set);
        continue;
      }
      Scopes scopes;
      const View view = copy_graph(*function->graph(), scopes, [](const Scope*) { return true; });
      collect(view.graph->block(), /*forward=*/false, written, all.set);
    }
    for (const std::string& path : c.paths)
      for (const std::string& attribute : written)
        for (const at::Tensor& t : all_tensors(value_at(submodule(module, path), attribute).value_or(c10::IValue())))
          if (t.has_storage() && !at::isIntegralType(t.scalar_type(), /*includeBool=*/true))
            all.storages.insert(t.storage().unsafeGetStorageImpl());
  }
  return all;
}

}  // namespace tsmem
