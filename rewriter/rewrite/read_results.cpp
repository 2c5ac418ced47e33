#include "rewriter/rewrite/read_results.h"

#include "rewriter/rewrite/canonical.h"
#include "rewriter/rewrite/order.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// Whether n's only result is its first argument, a tensor that it has overwritten.
bool gives_what_it_overwrites(const Node* n) {
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || !n->kind().is_aten() || schema->arguments().empty() || schema->returns().size() != 1) return false;
  const auto *argument = schema->arguments()[0].alias_info(), *result = schema->returns()[0].alias_info();
  return argument && argument->isWrite() && result && result->isWrite() && is_tensor(n->input(0));
}

Reader reader_of(const View& view, Node* overwriter, const Use& use) {
  Reader r{view.places.at(overwriter), {nullptr, nullptr}};
  r.input = use.offset;
  const Node* user = use.user;
  if (user->kind() == prim::Return) {
    const Node* around = user->owningBlock()->owningNode();
    if (!around) return r;
    const auto blocks = around->blocks();
    r.of_block = true;
    r.block = std::find(blocks.begin(), blocks.end(), user->owningBlock()) - blocks.begin();
    user = around;
  }
  r.user = view.places.at(user);
  return r;
}

// Whether `user`, other than n, sees nothing of what n writes to a tensor that it takes.
bool reads_before(const Node* user, const Node* n) {
  return exclusive(user, n) || (runs_before(user, n) && only_reads(user));
}

// Whether nobody but users of v sees what n writes to it, by the names that it had before.
bool is_seen_as_itself(const Value* v, const Node* n) {
  for (const Node* producer = v->node();; producer = v->node()) {
    if (!in_branches_of(n, producer->owningBlock())) return false;
    if (!gives_what_it_overwrites(producer)) return makes_fresh_tensor(producer) && !is_dropout(producer->kind());
    v = producer->input(0);
    for (const Use& use : v->uses())
      if (use.user == producer ? use.offset != 0 : !reads_before(use.user, n)) return false;
  }
}

// None where others see the tensor by another name, or may.
std::vector<Reader> readers_of(const View& view, Node* n) {
  if (!is_seen_as_itself(n->input(0), n)) return {};
  std::vector<Reader> readers;
  for (const Use& use : n->input(0)->uses()) {
    if (always_after(use.user, n))
      readers.push_back(reader_of(view, n, use));
    else if (use.user == n ? use.offset != 0 : !reads_before(use.user, n))
      return {};
  }
  return readers;
}

void collect(const View& view, Block* block, Readers& found) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) collect(view, b, found);
    if (!gives_what_it_overwrites(n)) continue;
    if (auto readers = readers_of(view, n); !readers.empty()) found.push_back(std::move(readers));
  }
}

Node* node_of(const View& view, const Place& place) {
  const auto it = view.copies.find({place.scope, place.node});
  return it == view.copies.end() ? nullptr : it->second;
}

}  // namespace

Readers readers_of_overwritten(const View& view) {
  Readers found;
  collect(view, view.graph->block(), found);
  return found;
}

void read_results(const View& view, const Readers& readers) {
  for (const auto& of_one : readers) {
    Node* n = node_of(view, of_one.front().overwriter);
    if (!n) continue;
    for (const Use& use : std::vector<Use>(n->input(0)->uses()))
      if (always_after(use.user, n)) use.user->replaceInput(use.offset, n->output());
  }
}

bool read_results(const View& copy, const std::vector<Reader>& readers) {
  for (const Reader& r : readers) {
    Node *n = node_of(copy, r.overwriter), *user = copy.graph->return_node();
    if (r.user.node && (user = node_of(copy, r.user)) && r.of_block) user = user->blocks()[r.block]->return_node();
    if (!n || !user || user->input(r.input) != n->input(0)) return false;
    user->replaceInput(r.input, n->output());
  }
  return true;
}

}  // namespace tsmem
