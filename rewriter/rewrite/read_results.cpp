#include "rewriter/rewrite/read_results.h"

#include "rewriter/rewrite/order.h"

namespace tsmem {

using namespace torch::jit;

// Whether n's only result is its first argument, a tensor that it has overwritten.
static bool gives_what_it_overwrites(const Node* n) {
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || !n->kind().is_aten() || schema->arguments().empty() || schema->returns().size() != 1) return false;
  const auto *argument = schema->arguments()[0].alias_info(), *result = schema->returns()[0].alias_info();
  return argument && argument->isWrite() && result && result->isWrite() &&
         n->input(0)->type()->isSubtypeOf(*TensorType::get());
}

void read_results(Node* in_place) {
  if (!gives_what_it_overwrites(in_place)) return;
  for (const Use& use : std::vector<Use>(in_place->input(0)->uses()))
    if (always_after(use.user, in_place)) use.user->replaceInput(use.offset, in_place->output());
}

void read_results(Block* block) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) read_results(b);
    read_results(n);
  }
}

}  // namespace tsmem
