#include "rewriter/modules.h"

#include <unordered_map>
#include <unordered_set>

#include "rewriter/method_call.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;

std::vector<ModuleClass> module_classes(const Module& module) {
  std::vector<ModuleClass> classes;
  std::unordered_map<const c10::ClassType*, size_t> index;
  std::unordered_set<const c10::ivalue::Object*> ancestors;
  // A shared submodule has several paths; all are listed. Modules can't contain themselves, other than by interfaces:
  // hence `ancestors`.
  std::function<void(const Module&, const std::string&)> walk = [&](const Module& m, const std::string& path) {
    if (!ancestors.insert(m._ivalue().get()).second) return;
    auto [it, is_new] = index.emplace(m.type().get(), classes.size());
    if (is_new) classes.push_back({m.type(), {}});
    classes[it->second].paths.push_back(path);
    for (const auto& child : m.named_children()) walk(child.value, join_path(path, child.name));
    ancestors.erase(m._ivalue().get());
  };
  walk(module, "");
  return classes;
}

Module submodule(Module m, const std::string& path) {
  for (size_t from = 0; from < path.size();) {
    const size_t dot = std::min(path.find('.', from), path.size());
    m = m.attr(path.substr(from, dot - from)).toModule();
    from = dot + 1;
  }
  return m;
}

std::optional<c10::IValue> value_at(const Module& m, const std::string& path) {
  c10::IValue value = m._ivalue();
  for (size_t from = 0; from <= path.size();) {
    const size_t dot = std::min(path.find('.', from), path.size());
    if (!value.isObject()) return std::nullopt;
    const auto& object = value.toObjectRef();
    const auto slot = object.type()->findAttributeSlot(path.substr(from, dot - from));
    if (!slot) return std::nullopt;
    // Through a copy: `value` holds the object that the slot is in.
    const c10::IValue next = object.getSlot(*slot);
    value = next;
    from = dot + 1;
  }
  return value;
}

at::Tensor attribute(const Module& m, const std::string& path) {
  const auto value = value_at(m, path);
  return value && value->isTensor() ? value->toTensor() : at::Tensor();
}

GraphFunction* graph_function(Function* f) { return f ? tryToGraphFunction(*f) : nullptr; }

std::shared_ptr<Graph> function_graph(Function* f) { return graph_function(f)->graph(); }

}  // namespace tsmem
