#include "rewriter/rewrite/autodiff.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/create_autodiff_subgraphs.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/peephole.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <map>
#include <set>

#include "rewriter/measure/estimate.h"
#include "rewriter/rewrite/preoptimized.h"

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
    if (!schema || schema->is_mutable() || n->outputs().size() != 1 || schema->returns().size() != 1 ||
        !schema->returns()[0].alias_info())
      continue;
    n->output()->replaceAllUsesWith(graph.addInput()->copyMetadata(n->output()));
    n->destroy();
  }
}

// LibTorch's pass throws std::out_of_range for some graphs in which a view and its source are used (seen with squeeze,
// torch 2.11), where the executor, which knows more of the types, runs it on less. It groups the rest as it would have.
void differentiate(std::shared_ptr<Graph>& graph) {
  const auto on_meta = estimate_on_meta();  // the pass compares constants, which may have no values
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

// One that draws random numbers: a dropout, else none.
struct Drawing {
  const Node* source;  // in the view
  bool differentiated;
};

// All that draw, in the order in which they run. `group`: whose block it is; null: none. `sources`: by number, which a
// dropout's probability says.
static void collect_drawings(Block* block, Node* group, const std::vector<const Node*>& sources,
                             std::vector<Drawing>& found) {
  for (Node* n : block->nodes()) {
    if (n->kind() == prim::DifferentiableGraph) collect_drawings(n->g(attr::Subgraph)->block(), n, sources, found);
    for (Block* b : n->blocks()) collect_drawings(b, group, sources, found);
    if (!draws(n)) continue;
    found.push_back({nullptr, group != nullptr});
    if (n->kind() != aten::dropout) continue;
    Value* p = n->input(1);
    if (group && p->node()->kind() == prim::Param) p = group->input(p->offset());
    if (auto value = toIValue(p); value && value->isDouble())
      for (size_t i = 0; i < sources.size(); ++i)
        if (value->toDouble() == probability(i)) found.back().source = sources[i];
  }
}

// How many that draw numbers which something is made of run before each dropout.
static std::map<const Node*, size_t> others_before(const std::vector<Drawing>& drawings) {
  std::map<const Node*, size_t> found;
  size_t count = 0;
  for (const Drawing& d : drawings) {
    if (d.source) found[d.source] = count;
    count += !(d.source && zero_or_one(d.source->input(1)));
  }
  return found;
}

// As the profiling executor does before it looks for what to differentiate.
static std::shared_ptr<Graph> profiled(std::shared_ptr<Graph> graph) {
  ConstantPropagation(graph);
  PeepholeOptimize(graph);
  EliminateDeadCode(graph);
  // It also puts an operator on each use of a tensor, which is moved with that use: so the order comes about.
  auto instrumented = ProfilingRecord::instrumentGraph(graph)->graph();
  ProfilingRecord::removeProfileCounter(instrumented->block());
  return instrumented;
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
  graph = profiled(graph);
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
  // The pass moves what it groups. Drawn for nothing before or behind another than in the source, numbers would shift
  // those that it draws.
  auto before = others_before(as_written), now = others_before(as_run);
  std::erase_if(found, [&](const Node* n) { return before[n] != now[n]; });
  return found;
}

namespace {

// Where a node stands in the model's source: the same in the original and in what is made of it.
std::string standing(const Node* n) { return n->sourceRange().str(); }

bool draws_as_run(const Node* n) {
  static const std::set<Symbol> ours = [] {
    std::set<Symbol> kinds;
    for (const char* name : {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu"})
      kinds.insert(Symbol::fromQualString(std::string("tsmem::") + name));
    return kinds;
  }();
  return draws(n) || ours.count(n->kind()) > 0;
}

void each_node(Block* block, const std::function<void(Node*)>& f) {
  for (Node* n : block->nodes()) {
    f(n);
    if (n->kind() == prim::DifferentiableGraph) each_node(n->g(attr::Subgraph)->block(), f);
    for (Block* b : n->blocks()) each_node(b, f);
  }
}

std::vector<std::string> drawn(Graph& graph) {
  std::vector<std::string> found;
  each_node(graph.block(), [&](Node* n) {
    if (draws_as_run(n)) found.push_back(standing(n));
  });
  return found;
}

bool overwrites(const Node* n) {
  const FunctionSchema* schema = n->maybeSchema();
  return schema && schema->is_mutable() && n->input(0)->type()->isSubtypeOf(*TensorType::get()) &&
         n->input(0)->node()->kind() != prim::GetAttr;
}

// A dropout that drops nothing or all, as far as is known.
bool may_draw_for_nothing(const Node* n) {
  static const Symbol ours = Symbol::fromQualString("tsmem::dropout");
  if (n->kind() != aten::dropout && n->kind() != ours) return false;
  return zero_or_one(n->input(1)) || !toIValue(n->input(1));
}

// How many dropouts draw for nothing when TorchScript has differentiated a graph: those that it differentiates, and our
// own that do as those would have.
size_t draw_for_nothing(const View& view) {
  size_t count = 0;
  const auto differentiated = differentiated_dropouts(view);
  each_node(view.graph->block(), [&](Node* n) {
    if (may_draw_for_nothing(n))
      count += n->kind() == aten::dropout ? differentiated.count(n) : toIValue(n->input(3)) == c10::IValue(true);
  });
  return count;
}

// What TorchScript's groups change that can be seen from outside.
struct Seen {
  std::vector<std::string> as_written, as_run;  // what draws random numbers, in its order
  // Operators whose results leave a group and are overwritten after it: where they stand, and what they are.
  std::map<std::string, std::string> overwritten;
};

// Without overwritten tensors or two draws there is nothing to see.
bool may_be_seen(Graph& graph) {
  size_t writes = 0, drawing = 0;
  each_node(graph.block(), [&](Node* n) {
    writes += overwrites(n);
    drawing += draws_as_run(n);
  });
  return writes > 0 || drawing > 1;
}

Seen seen(const View& view) {
  auto graph = profiled(view.graph->copy());
  Seen result;
  result.as_written = drawn(*graph);
  differentiate(graph);
  result.as_run = drawn(*graph);
  std::vector<Node*> groups, writes;
  const std::function<void(Block*)> collect = [&](Block* block) {
    for (Node* n : block->nodes()) {
      if (n->kind() == prim::DifferentiableGraph) groups.push_back(n);
      if (overwrites(n)) writes.push_back(n);
      for (Block* b : n->blocks()) collect(b);
    }
  };
  collect(graph->block());
  if (groups.empty() || writes.empty()) return result;
  AliasDb aliases(graph);
  for (Node* group : groups)
    for (size_t i = 0; i < group->outputs().size(); ++i)
      if (std::any_of(writes.begin(), writes.end(),
                      [&](Node* n) { return aliases.writesToAlias(n, {group->output(i)}); })) {
        const Node* made = group->g(attr::Subgraph)->outputs()[i]->node();
        result.overwritten.emplace(standing(made), made->kind().toQualString());
      }
  return result;
}

}  // namespace

bool draws_beside(const View& view) {
  static const Symbol checkpoint = Symbol::fromQualString("tsmem::checkpoint");
  bool draws = false, hides = false;
  each_node(view.graph->block(), [&](Node* n) {
    draws |= draws_as_run(n) && !may_draw_for_nothing(n);
    hides |= n->kind() == checkpoint;
  });
  return draws && !hides;
}

std::string regrouped(const View& original, const View& rewritten) {
  if (!may_be_seen(*rewritten.graph)) return "";
  const Seen after = seen(rewritten);
  if (draws_beside(rewritten) && draw_for_nothing(original) != draw_for_nothing(rewritten))
    return "TorchScript would draw for other dropouts that drop nothing than in the original, and the dropouts after "
           "them would draw other numbers";
  if (after.overwritten.empty() && after.as_run == after.as_written) return "";
  const Seen before = seen(original);
  for (const auto& [where, what] : after.overwritten)
    if (!before.overwritten.count(where))
      return fmt::format(
          "TorchScript would differentiate {} together with other operators, and its result is "
          "overwritten later: backward may raise an error where the original's does not",
          what);
  if (after.as_run != after.as_written && after.as_run != before.as_run)
    return "TorchScript would run its dropouts in another order than the original's, with other draws";
  return "";
}

}  // namespace tsmem
