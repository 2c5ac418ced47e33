#include "rewriter/unused_norms.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/jit/passes/constant_pooling.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/decompose_ops.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/peephole.h>

namespace tsmem {

using namespace torch::jit;

bool updates_statistics(const Node* n) {
  if (n->kind() != aten::batch_norm && n->kind() != aten::instance_norm) return false;
  const auto training = toIValue(n->input(5));
  return n->input(3)->type()->kind() != NoneType::Kind && !(training && !training->toBool());
}

static void collect_norms(Block* block, std::vector<Node*>& found) {
  for (Node* n : block->nodes()) {
    if (updates_statistics(n)) found.push_back(n);
    for (Block* b : n->blocks()) collect_norms(b, found);
  }
}

static std::vector<Node*> norms_of(Graph& graph) {
  std::vector<Node*> found;
  collect_norms(graph.block(), found);
  return found;
}

// Those that TorchScript may drop: its simplest pass does, to which only an op that overwrites something by its schema
// is of use in itself.
static std::vector<Node*> unused_norms(Graph& graph) {
  const auto norms = norms_of(graph);
  if (norms.empty()) return {};
  const auto copy = graph.copy();
  const auto copies = norms_of(*copy);
  EliminateDeadCode(copy->block());
  const auto left = norms_of(*copy);
  const std::unordered_set<const Node*> used(left.begin(), left.end());
  std::vector<Node*> unused;
  for (size_t i = 0; i < norms.size(); ++i)
    if (!used.count(copies[i])) unused.push_back(norms[i]);
  return unused;
}

// The calls around a node of the original, from the inside, which are the same whatever else was inlined.
static std::vector<const Node*> path_of(const Place& place) {
  std::vector<const Node*> path = {place.node};
  for (const Scope* s = place.scope; s; s = s->parent)
    if (s->branch < 0) path.push_back(s->node);
  return path;
}

namespace {

using Way = std::vector<const Node*>;  // as path_of gives it

// A function's code as its callers get it, and the ways to the norms in it.
struct Preoptimized {
  std::shared_ptr<Graph> graph;
  std::map<const Node*, Way> ways;
};

// What TorchScript does with a function's graph (preoptimizeGraph in torch/csrc/jit/api/function_impl.cpp): the code of
// its callees, done with in the same way, is put in, and all of it is simplified. What there was to simplify decides
// whether it then drops norms that nothing uses.
Preoptimized preoptimized(const Graph& source, const BodyOf& body_of) {
  std::map<const Node*, Preoptimized> callees;
  const auto body = [&](const Node* call) -> std::shared_ptr<Graph> {
    const auto known = callees.find(call);
    if (known != callees.end()) return known->second.graph;
    const auto graph = body_of(call);
    return graph ? callees.emplace(call, preoptimized(*graph, body_of)).first->second.graph : nullptr;
  };
  Scopes scopes;
  const View view = copy_graph(
      source, scopes, [](const Scope* s) { return s->branch < 0; }, body, /*exact=*/true);
  std::map<const Node*, Way> ways;
  for (const Node* n : norms_of(*view.graph)) {
    const Place& place = view.places.at(n);
    Way& way = ways[n];
    way = {place.node};
    if (!place.scope) continue;
    way = callees.at(place.scope->node).ways.at(place.node);
    way.push_back(place.scope->node);
  }
  std::shared_ptr<Graph> graph = view.graph;
  PeepholeOptimize(graph, /*disable_shape_peepholes=*/true);
  ConstantPropagationImmutableTypes(graph);
  ConstantPooling(graph);
  return {graph, std::move(ways)};
}

}  // namespace

// The norms that are still there when the first call runs: after what the profiling executor does with a method's graph
// (runProfilingInsensitiveOptimizations in torch/csrc/jit/runtime/profiling_graph_executor_impl.cpp).
static std::set<Way> run_by_torchscript(const Graph& source, const BodyOf& body_of) {
  auto [graph, ways] = preoptimized(source, body_of);
  EliminateDeadCode(graph);
  DecomposeOps(graph);
  ConstantPropagation(graph);
  EliminateDeadCode(graph);
  EliminateCommonSubexpression(graph);
  ConstantPooling(graph);
  PeepholeOptimize(graph);
  EliminateDeadCode(graph);
  LowerSimpleTuples(graph);
  std::set<Way> left;
  for (const Node* n : norms_of(*graph))
    if (const auto way = ways.find(n); way != ways.end()) left.insert(way->second);
  return left;
}

void keep_unused_norms(const Graph& source, View& body, const BodyOf& body_of) {
  const auto unused = unused_norms(*body.graph);
  if (unused.empty()) return;
  const auto run = run_by_torchscript(source, callee), run_in_body = run_by_torchscript(*body.graph, body_of);
  const Symbol keep = Symbol::fromQualString("tsmem::keep");
  for (Node* n : unused)
    if (!run_in_body.count({n}) && run.count(path_of(body.places.at(n))))
      body.graph->create(keep, {n->output(), n->input(3)}, 0)->insertAfter(n);
}

}  // namespace tsmem
