#include "rewriter/measure/module_paths.h"

#include <fmt/format.h>

#include <algorithm>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/modules.h"
#include "rewriter/stays/saved_tensors.h"

namespace tsmem {

std::optional<ModulePlace> ModulePaths::current(const ModulePlace* from, const std::string& op) {
  auto names = torch::jit::currentModuleHierarchy();
  ModulePlace at = from ? *from : root_;
  if (names.empty()) return at;
  if (names[0].starts_with("TOP()::")) return {};
  auto calls = torch::jit::currentCallstack();
  std::reverse(calls.begin(), calls.end());  // innermost first, unlike the names
  std::lock_guard lock(mutex_);
  for (size_t i = 1; i < names.size() && i - 1 < calls.size(); ++i) {
    auto open = names[i].find('('), colons = names[i].rfind("::");
    if (open == std::string::npos || colons == std::string::npos) continue;  // a free function
    auto instance = names[i].substr(0, open), method = names[i].substr(colons + 2);
    if (instance != "SELF" && !follow(at, calls[i - 1], c10::prim::CallMethod, instance, method)) return at;
  }
  if (!op.empty() && !calls.empty()) enter_owner(at, calls.back(), op);
  return at;
}

// The operator's node in a block, by its place in the source.
static const torch::jit::Node* find_op(const torch::jit::Block& block, const torch::jit::StackEntry& call,
                                       const std::string& op) {
  for (auto* n : block.nodes()) {
    for (auto* b : n->blocks())
      if (const auto* found = find_op(*b, call, op)) return found;
    if (n->sourceRange().start() == call.range.start() && n->sourceRange().end() == call.range.end() &&
        n->kind().toQualString() == op)
      return n;
  }
  return nullptr;
}

void ModulePaths::enter_owner(ModulePlace& at, const torch::jit::StackEntry& call, const std::string& op) {
  const auto type = at.object->type();
  auto [it, fresh] = owners_.try_emplace(Key{type.get(), call.filename, call.range.start(), call.range.end(), op, ""});
  if (fresh) {
    auto* caller = type->findMethod(call.filename);
    auto* function = caller ? torch::jit::tryToGraphFunction(*caller) : nullptr;
    const auto* node = function ? find_op(*function->graph()->block(), call, op) : nullptr;
    if (node) it->second = module_path(node);
    if (node && it->second.empty()) it->second = module_of_parameters(node).value_or("");
  }
  if (it->second.empty()) return;
  // A module without parameters is a path alone in a program of torch.export.
  at.path = join_path(at.path, it->second);
  if (const auto value = value_at(torch::jit::Module(at.object), it->second); value && value->isModule())
    at.object = value->toModule()._ivalue();
}

ModulePlace ModulePaths::called(ModulePlace caller, const std::string& op) {
  auto calls = torch::jit::currentCallstack();
  std::lock_guard lock(mutex_);
  if (!calls.empty()) follow(caller, calls.front(), c10::Symbol::fromQualString(op), "", "");
  return caller;
}

// From the module that makes a call to the one it calls. False where it can't be told.
bool ModulePaths::follow(ModulePlace& at, const torch::jit::StackEntry& call, c10::Symbol kind,
                         const std::string& instance, const std::string& method) {
  for (auto& attribute : steps(at.object->type(), call, kind, instance, method)) {
    auto slot = at.object->type()->findAttributeSlot(attribute);
    if (!slot || !at.object->getSlot(*slot).isObject()) return false;
    at.object = at.object->getSlot(*slot).toObject();
    at.path += fmt::format("{}{}", at.path.empty() ? "" : ".", attribute);
  }
  return true;
}

// The attributes that lead from self to the module that a call is of, where the block has that call.
static std::vector<std::string> find_call(const torch::jit::Block& block, const torch::jit::StackEntry& call,
                                          c10::Symbol kind, const std::string& instance, const std::string& method) {
  for (auto* n : block.nodes()) {
    for (auto* b : n->blocks())
      if (auto found = find_call(*b, call, kind, instance, method); !found.empty()) return found;
    if (n->kind() != kind || n->sourceRange().start() != call.range.start() ||
        n->sourceRange().end() != call.range.end())
      continue;
    if (kind == c10::prim::CallMethod && n->s(c10::attr::name) != method) continue;
    std::vector<std::string> chain;
    auto* from = n->input(0)->node();
    for (; from->kind() == c10::prim::GetAttr; from = from->input(0)->node())
      chain.insert(chain.begin(), from->s(c10::attr::name));
    if (from->kind() == c10::prim::Param && !chain.empty() && (instance.empty() || chain.back() == instance))
      return chain;
  }
  return {};
}

const std::vector<std::string>& ModulePaths::steps(const c10::ClassTypePtr& type, const torch::jit::StackEntry& call,
                                                   c10::Symbol kind, const std::string& instance,
                                                   const std::string& method) {
  auto [it, fresh] =
      cache_.try_emplace(Key{type.get(), call.filename, call.range.start(), call.range.end(), instance, method});
  if (!fresh) return it->second;
  auto* caller = type->findMethod(call.filename);
  if (auto* function = caller ? torch::jit::tryToGraphFunction(*caller) : nullptr)
    it->second = find_call(*function->graph()->block(), call, kind, instance, method);
  if (it->second.empty() && !instance.empty()) it->second = {instance};
  return it->second;
}

}  // namespace tsmem
