#include "rewriter/rewrite/order.h"

namespace tsmem {

using namespace torch::jit;

// The blocks around a node, outermost first.
static std::vector<const Block*> blocks_around(const Node* n) {
  std::vector<const Block*> blocks;
  for (const Block* b = n->owningBlock(); b; b = b->owningNode() ? b->owningNode()->owningBlock() : nullptr)
    blocks.insert(blocks.begin(), b);
  return blocks;
}

bool runs_before(const Node* a, const Node* b) {
  const auto x = blocks_around(a), y = blocks_around(b);
  size_t shared = 0;
  while (shared < x.size() && shared < y.size() && x[shared] == y[shared]) ++shared;
  const Node* in_x = shared < x.size() ? x[shared]->owningNode() : a;
  const Node* in_y = shared < y.size() ? y[shared]->owningNode() : b;
  return in_x->kind() != prim::Return && in_x != in_y && in_x->isBefore(in_y);
}

bool always_after(const Node* later, const Node* n) {
  while (later && later->owningBlock() != n->owningBlock()) later = later->owningBlock()->owningNode();
  return later && later != n && (later->kind() == prim::Return || later->isAfter(n));
}

bool may_run_after(const Node* later, const Node* n) {
  if (in_one_loop(later, n)) return true;
  const auto x = blocks_around(later), y = blocks_around(n);
  size_t shared = 0;
  while (shared < x.size() && shared < y.size() && x[shared] == y[shared]) ++shared;
  const Node* in_x = shared < x.size() ? x[shared]->owningNode() : later;
  const Node* in_y = shared < y.size() ? y[shared]->owningNode() : n;
  return in_x != in_y && in_x->isAfter(in_y);
}

bool in_one_loop(const Node* a, const Node* b) {
  const auto x = blocks_around(a), y = blocks_around(b);
  for (size_t i = 0; i < x.size() && i < y.size() && x[i] == y[i]; ++i)
    if (x[i]->owningNode() && x[i]->owningNode()->kind() == prim::Loop) return true;
  return false;
}

bool exclusive(const Node* a, const Node* b) {
  const auto x = blocks_around(a), y = blocks_around(b);
  for (size_t i = 0; i < x.size() && i < y.size(); ++i)
    if (x[i] != y[i]) return x[i]->owningNode() == y[i]->owningNode() && x[i]->owningNode()->kind() == prim::If;
  return false;
}

bool in_branches_of(const Node* n, const Block* block) {
  while (n->owningBlock() != block) {
    n = n->owningBlock()->owningNode();
    if (!n || n->kind() != prim::If) return false;
  }
  return true;
}

bool exits_into(const Node* inner, const Node* n) {
  for (const Node* p = inner; p; p = p->owningBlock()->owningNode()) {
    if (p != inner && p->kind() != prim::If) return false;
    if (in_branches_of(n, p->owningBlock())) return true;
  }
  return false;
}

}  // namespace tsmem
