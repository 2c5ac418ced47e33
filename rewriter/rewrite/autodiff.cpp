#include "rewriter/rewrite/autodiff.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/create_autodiff_subgraphs.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/peephole.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

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
void differentiate(std::shared_ptr<Graph>& graph) {
  const auto whole = graph->copy();
  try {
    CreateAutodiffSubgraphs(graph, /*threshold=*/2);
  } catch (const std::out_of_range&) {
    graph = whole;
    cut_views(*graph, graph->block());
    CreateAutodiffSubgraphs(graph, /*threshold=*/2);
  }
}

// Tells each dropout in the graphs that the passes make.
static double probability(size_t i) { return 0.25 + static_cast<double>(i) * 0x1p-30; }

// One that draws random numbers: a dropout that may draw for nothing, else none.
struct Drawing {
  const Node* source;  // in the view
  bool differentiated;
  bool operator==(const Drawing& other) const { return source == other.source; }
};

// All that draw, in the order in which they run. `group`: whose block it is; null: none. `sources`: by number, which a
// dropout's probability says.
static void collect_drawings(Block* block, Node* group, const std::vector<const Node*>& sources,
                             std::vector<Drawing>& found) {
  for (Node* n : block->nodes()) {
    if (n->kind() == prim::DifferentiableGraph) collect_drawings(n->g(attr::Subgraph)->block(), n, sources, found);
    for (Block* b : n->blocks()) collect_drawings(b, group, sources, found);
    if (n->kind() != aten::dropout && !n->isNondeterministic()) continue;
    found.push_back({nullptr, group != nullptr});
    if (n->kind() != aten::dropout) continue;
    Value* p = n->input(1);
    if (group && p->node()->kind() == prim::Param) p = group->input(p->offset());
    if (auto value = toIValue(p); value && value->isDouble())
      for (size_t i = 0; i < sources.size(); ++i)
        if (value->toDouble() == probability(i)) found.back().source = sources[i];
  }
}

std::unordered_set<const Node*> differentiated_dropouts(const View& view) {
  std::vector<const Node*> sources;
  each_dropout(view.graph->block(), [&](Node* n) { sources.push_back(n); });
  std::unordered_set<const Node*> found;
  if (sources.empty()) return found;
  auto graph = view.graph->copy();
  size_t count = 0;
  each_dropout(graph->block(), [&](Node* n) {
    WithInsertPoint here(n);
    n->replaceInput(1, graph->insertConstant(probability(count++)));
  });
  // As the profiling executor does before it looks for what to differentiate.
  ConstantPropagation(graph);
  PeepholeOptimize(graph);
  EliminateDeadCode(graph);
  // It also puts an operator on each use of a tensor, which is moved with that use: so the order comes about.
  graph = ProfilingRecord::instrumentGraph(graph)->graph();
  ProfilingRecord::removeProfileCounter(graph->block());
  const auto drawings = [&] {
    std::vector<Drawing> all;
    collect_drawings(graph->block(), nullptr, sources, all);
    return all;
  };
  const auto as_written = drawings();
  differentiate(graph);
  const auto as_run = drawings();
  for (const Drawing& d : as_run)
    if (d.differentiated && d.source) found.insert(d.source);
  // The pass moves what it groups. Drawn for nothing in another place, numbers would shift those that others draw.
  const auto for_nothing = [](std::vector<Drawing> all) {
    for (Drawing& d : all)
      if (d.source)
        if (const auto p = toIValue(d.source->input(1)); p && p->isDouble() && p->toDouble() > 0 && p->toDouble() < 1)
          d.source = nullptr;
    return all;
  };
  if (for_nothing(as_written) != for_nothing(as_run)) found.clear();
  return found;
}

}  // namespace tsmem
