#include "rewriter/rewrite/regrouped.h"

#include <torch/csrc/jit/api/function_impl.h>

#include <map>
#include <set>

#include "rewriter/rewrite/autodiff.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// The methods that a block calls, themselves or by others.
void add_called(const Block* block, std::set<Method>& called) {
  for (const Node* n : block->nodes()) {
    for (const Block* inner : n->blocks()) add_called(inner, called);
    const auto body = n->kind() == prim::CallMethod || n->kind() == prim::CallFunction ? callee(n) : nullptr;
    if (!body) continue;
    if (n->kind() == prim::CallMethod)
      if (const auto type = n->input(0)->type()->cast<c10::ClassType>();
          type && !called.insert({type.get(), n->s(attr::name)}).second)
        continue;
    add_called(body->block(), called);
  }
}

View whole(const Graph& graph, Scopes& scopes, const BodyOf& body_of) {
  return copy_graph(
      graph, scopes, [](const Scope*) { return true; }, body_of);
}

}  // namespace

bool refuse_regrouped(const Results& built, Results& found) {
  std::map<Method, std::set<Method>> calls;
  std::set<Method> inner;
  for (const auto& [method, result] : built) {
    add_called(function_graph(method.first->findMethod(method.second))->block(), calls[method]);
    inner.insert(calls[method].begin(), calls[method].end());
  }
  const BodyOf rewritten = rewritten_bodies(built);
  bool any = false;
  for (const auto& [method, result] : built) {
    if (inner.count(method)) continue;
    const Graph& source = *function_graph(method.first->findMethod(method.second));
    Scopes before, after;
    const std::string why =
        regrouped(whole(source, before, callee), whole(result.body ? *result.body : source, after, rewritten));
    if (why.empty()) continue;
    std::set<Method> all = calls[method];
    all.insert(method);
    for (const Method& m : all) {
      const auto it = found.find(m);
      if (it == found.end()) continue;
      for (const FoundMatch& match : it->second.allowed) {
        it->second.refused.push_back({match.pattern->name, "", why});
        any = true;
      }
      it->second.allowed.clear();
    }
  }
  return any;
}

}  // namespace tsmem
