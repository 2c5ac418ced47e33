#include "rewriter/rewrite/observed.h"

#include <set>

#include "rewriter/method_call.h"
#include "rewriter/rewrite/operators.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// What they say of a tensor does not depend on its values, and TorchScript may know it beforehand.
bool asks_for_no_values(const Node* n) {
  static const std::set<Symbol> kinds = {
      aten::size,   aten::dim,           Symbol::aten("numel"),   aten::len,    prim::dtype,    prim::device,
      prim::layout, prim::requires_grad, aten::is_floating_point, aten::__is__, aten::__isnot__};
  return kinds.count(n->kind()) > 0;
}

struct Observer {
  std::unordered_set<const Value*> observed;

  void see(const Value* v) { observed.insert(v); }
  void see_all(at::ArrayRef<Value*> values) {
    for (const Value* v : values) see(v);
  }
  bool seen_any(at::ArrayRef<Value*> values) const {
    return std::any_of(values.begin(), values.end(), [&](const Value* v) { return observed.count(v) > 0; });
  }

  // Whether a value may be in memory that is looked at later, or from outside: it or what it is a view of.
  bool memory_is_seen(const Value* v) const {
    while (!observed.count(v)) {
      const Node* n = v->node();
      if (n->kind() == prim::Param) return n->owningBlock() == n->owningGraph()->block();
      if (n->kind() == prim::GetAttr) return true;
      const FunctionSchema* schema = n->maybeSchema();
      if (!schema || schema->arguments().empty() || !schema->arguments()[0].alias_info() || n->inputs().empty())
        return false;
      v = n->input(0);
    }
    return true;
  }

  bool writes_to_what_is_seen(const Node* n) const {
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema) return false;
    for (size_t i = 0; i < std::min(schema->arguments().size(), n->inputs().size()); ++i) {
      const auto* alias = schema->arguments()[i].alias_info();
      if (alias && alias->isWrite() && memory_is_seen(n->input(i))) return true;
    }
    return false;
  }

  // Whether a node has an effect in itself that no schema tells of.
  static bool acts_unseen(const Node* n) {
    switch (n->kind()) {
      case prim::SetAttr:
      case prim::Print:
      case prim::CallMethod:
      case prim::CallFunction:
      case prim::fork:
      case aten::wait:
        return true;
      default:
        return runs_unseen(n) || (!n->maybeSchema() && !n->kind().is_prim()) || calls_method(n->kind().toQualString());
    }
  }

  // From the last node to the first: what comes later decides whether a write is seen.
  void look_at(Block* block) {
    for (auto it = block->nodes().rbegin(); it != block->nodes().rend(); ++it) look_at(*it);
  }

  void look_at_if(Node* n) {
    for (Block* b : n->blocks())
      for (size_t i = 0; i < n->outputs().size(); ++i)
        if (observed.count(n->output(i))) see(b->outputs()[i]);
    const size_t before = observed.size();
    for (Block* b : n->blocks()) look_at(b);
    if (observed.size() > before || seen_any(n->outputs())) see(n->input(0));
  }

  // What a round hands on to the next is seen if the next sees it: until nothing more is.
  void look_at_loop(Node* n) {
    Block* body = n->blocks()[0];
    for (size_t i = 0; i < n->outputs().size(); ++i)
      if (observed.count(n->output(i))) {
        see(body->outputs()[i + 1]);
        see(n->input(i + 2));
      }
    const size_t start = observed.size();
    for (size_t before = start - 1; before != observed.size();) {
      before = observed.size();
      look_at(body);
      for (size_t i = 0; i + 2 < n->inputs().size(); ++i)
        if (observed.count(body->inputs()[i + 1])) {
          see(n->input(i + 2));
          see(body->outputs()[i + 1]);
        }
      if (observed.size() > start || seen_any(n->outputs())) {
        see(n->input(0));
        see(n->input(1));
        see(body->outputs()[0]);
      }
    }
  }

  void look_at(Node* n) {
    if (n->kind() == prim::If) return look_at_if(n);
    if (n->kind() == prim::Loop) return look_at_loop(n);
    if (!n->blocks().empty()) {
      for (Block* b : n->blocks()) {
        see_all(b->outputs());
        look_at(b);
      }
      return see_all(n->inputs());
    }
    if (asks_for_no_values(n)) return;
    if (acts_unseen(n) || seen_any(n->outputs()) || writes_to_what_is_seen(n)) see_all(n->inputs());
  }
};

}  // namespace

std::unordered_set<const Value*> observed_values(Graph& graph) {
  Observer o;
  o.see_all(graph.outputs());
  o.look_at(graph.block());
  return std::move(o.observed);
}

}  // namespace tsmem
