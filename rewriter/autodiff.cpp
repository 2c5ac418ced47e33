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

// Makes what views give out inputs of the graph.
static void cut_views(Graph& graph, Block* block) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    Node* n = *it++;
    for (Block* b : n->blocks()) cut_views(graph, b);
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || schema->is_mutable() || n->outputs().size() != 1 || !schema->returns()[0].alias_info()) continue;
    n->output()->replaceAllUsesWith(graph.addInput()->copyMetadata(n->output()));
    n->destroy();
  }
}

// LibTorch's pass throws std::out_of_range for some graphs in which a view and its source are used (seen with squeeze,
// torch 2.11), where the executor, which knows more of the types, runs it on less. It groups the rest as it would have.
static std::vector<Node*> differentiable_groups(std::shared_ptr<Graph>& graph) {
  const auto whole = graph->copy();
  try {
    return CreateAutodiffSubgraphs(graph, /*threshold=*/2);
  } catch (const std::out_of_range&) {
    graph = whole;
    cut_views(*graph, graph->block());
    return CreateAutodiffSubgraphs(graph, /*threshold=*/2);
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
  for (Node* group : differentiable_groups(graph))
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
