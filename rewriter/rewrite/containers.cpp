#include "rewriter/rewrite/containers.h"

#include <torch/csrc/jit/api/function_impl.h>

#include "rewriter/modules.h"

namespace tsmem {

using namespace torch::jit;

namespace {

bool is_container(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::DictType || type->kind() == c10::TypeKind::ListType;
}

// Whether what an element of it is can't be changed itself.
bool is_plain(const c10::TypePtr& type) {
  static const std::set<c10::TypeKind> kinds = {c10::TypeKind::StringType, c10::TypeKind::IntType,
                                                c10::TypeKind::FloatType, c10::TypeKind::BoolType};
  return kinds.count(type->kind()) > 0;
}

bool only_looks(const Use& use) {
  const Node* n = use.user;
  if (use.offset != 0) return false;
  return n->kind() == aten::__contains__ || n->kind() == aten::len || n->kind() == aten::keys ||
         (n->kind() == aten::__getitem__ && is_plain(n->output()->type()));
}

void collect_changed(Block* block, std::set<std::string>& changed) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) collect_changed(b, changed);
    if (n->kind() == prim::SetAttr && is_container(n->input(1)->type())) changed.insert(n->s(attr::name));
    if (n->kind() != prim::GetAttr || !is_container(n->output()->type())) continue;
    const auto& uses = n->output()->uses();
    if (!std::all_of(uses.begin(), uses.end(), only_looks)) changed.insert(n->s(attr::name));
  }
}

bool same_key(const c10::IValue& a, const c10::IValue& b) {
  return (a.isString() && b.isString() && a.toStringRef() == b.toStringRef()) ||
         (a.isInt() && b.isInt() && a.toInt() == b.toInt());
}

std::optional<bool> has(const c10::IValue& container, const c10::IValue& key) {
  if (!key.isString() && !key.isInt()) return std::nullopt;
  if (container.isGenericDict()) {
    for (const auto& entry : container.toGenericDict())
      if (same_key(entry.key(), key)) return true;
    return false;
  }
  if (!container.isList()) return std::nullopt;
  const auto elements = container.toListRef();
  return std::any_of(elements.begin(), elements.end(), [&](const c10::IValue& e) { return same_key(e, key); });
}

}  // namespace

std::set<std::string> changed_containers(const Module& module) {
  std::set<std::string> changed;
  for (const ModuleClass& c : module_classes(module))
    for (Function* f : c.type->methods())
      if (const GraphFunction* function = graph_function(f)) collect_changed(function->graph()->block(), changed);
  return changed;
}

Contains contains_in(std::vector<Module> instances, std::set<std::string> changed) {
  return [instances = std::move(instances), changed = std::move(changed)](
             const std::string& path, const c10::IValue& key) -> std::optional<bool> {
    if (path.empty() || changed.count(path.substr(path.rfind('.') + 1))) return std::nullopt;
    std::optional<bool> all;
    for (const Module& m : instances) {
      const auto value = value_at(m, path);
      const auto one = value ? has(*value, key) : std::nullopt;
      if (!one || (all && *all != *one)) return std::nullopt;
      all = one;
    }
    return all;
  };
}

}  // namespace tsmem
