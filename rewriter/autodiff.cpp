#include "rewriter/autodiff.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/create_autodiff_subgraphs.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/peephole.h>

namespace tsmem {

using namespace torch::jit;

static void each_dropout(Block* block, const std::function<void(Node*)>& f) {
  for (Node* n : block->nodes()) {
    if (n->kind() == aten::dropout) f(n);
    for (Block* b : n->blocks()) each_dropout(b, f);
  }
}

std::unordered_set<const Node*> differentiated_dropouts(const View& view) {
  std::vector<const Node*> sources;
  each_dropout(view.graph->block(), [&](Node* n) { sources.push_back(n); });
  std::unordered_set<const Node*> found;
  if (sources.empty()) return found;
  auto graph = view.graph->copy();
  // A probability of its own tells each node in the graphs that the passes make.
  const auto probability = [](size_t i) { return 0.25 + static_cast<double>(i) * 0x1p-30; };
  size_t count = 0;
  each_dropout(graph->block(), [&](Node* n) {
    WithInsertPoint here(n);
    n->replaceInput(1, graph->insertConstant(probability(count++)));
  });
  // As the profiling executor does before it looks for what to differentiate.
  ConstantPropagation(graph);
  PeepholeOptimize(graph);
  EliminateDeadCode(graph);
  for (Node* group : CreateAutodiffSubgraphs(graph, /*threshold=*/2))
    each_dropout(group->g(attr::Subgraph)->block(), [&](Node* n) {
      Value* p = n->input(1);
      if (p->node()->kind() == prim::Param) p = group->input(p->offset());
      if (auto value = toIValue(p); value && value->isDouble())
        for (size_t i = 0; i < sources.size(); ++i)
          if (value->toDouble() == probability(i)) found.insert(sources[i]);
    });
  return found;
}

}  // namespace tsmem
