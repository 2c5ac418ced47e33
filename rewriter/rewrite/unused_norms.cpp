#include "rewriter/rewrite/unused_norms.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/jit/passes/constant_pooling.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/decompose_ops.h>
#include <torch/csrc/jit/passes/loop_unrolling.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/peephole.h>
#include <torch/csrc/jit/passes/remove_expands.h>
#include <torch/csrc/jit/passes/remove_mutation.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include "ops/recompute_argument.h"
#include "rewriter/measure/estimate.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/autodiff.h"
#include "rewriter/rewrite/observed.h"
#include "rewriter/rewrite/preoptimized.h"

namespace tsmem {

using namespace torch::jit;

static std::vector<Node*> norms_of(Graph& graph) { return nodes_where(graph, updates_statistics); }

// Those that TorchScript may drop: its simplest pass does, to which only an op that overwrites something by its schema
// is of use in itself. All calls are code by then.
static std::vector<Node*> unused_norms(Graph& graph, const BodyOf& body_of) {
  const auto norms = norms_of(graph);
  if (norms.empty()) return {};
  Scopes scopes;
  const View whole = copy_graph(
      graph, scopes, [](const Scope*) { return true; }, body_of, /*exact=*/true);
  EliminateDeadCode(whole.graph->block());
  std::set<Way> used;
  for (const Node* n : norms_of(*whole.graph)) used.insert(way_of(whole.places.at(n)));
  std::vector<Node*> unused;
  for (Node* n : norms)
    if (!used.count({n})) unused.push_back(n);
  return unused;
}

// Others that nothing uses once the body has been written to a file and read: that folds constants, and where there
// were any, TorchScript drops what only overwrites a tensor that nobody sees.
static std::vector<Node*> unused_once_read(Graph& graph, const BodyOf& body_of, const std::vector<Node*>& unused_now) {
  const auto norms = norms_of(graph);
  if (norms.size() == unused_now.size()) return {};
  Scopes scopes;
  const View read = copy_graph(
      graph, scopes, [](const Scope*) { return false; }, body_of, /*exact=*/true);
  std::shared_ptr<Graph> copy = read.graph;
  ConstantPropagationImmutableTypes(copy);
  EliminateDeadCode(copy->block());
  std::set<const Node*> used;
  for (const Node* n : norms_of(*copy)) used.insert(read.places.at(n).node);
  std::vector<Node*> unused;
  for (Node* n : norms)
    if (!used.count(n) && std::find(unused_now.begin(), unused_now.end(), n) == unused_now.end()) unused.push_back(n);
  return unused;
}

// What the profiling executor does with a method's graph before its first call (runProfilingInsensitiveOptimizations in
// torch/csrc/jit/runtime/profiling_graph_executor_impl.cpp).
static void simplify_for_first_call(std::shared_ptr<Graph>& graph) {
  EliminateDeadCode(graph);
  DecomposeOps(graph);
  ConstantPropagation(graph);
  EliminateDeadCode(graph);
  EliminateCommonSubexpression(graph);
  ConstantPooling(graph);
  PeepholeOptimize(graph);
  EliminateDeadCode(graph);
  LowerSimpleTuples(graph);
}

// The norms that run in the first call.
static std::set<Way> run_by_torchscript(const Graph& source, const BodyOf& body_of) {
  std::map<const Graph*, Preoptimized> callees;
  auto [graph, ways] = preoptimized(source, body_of, callees);
  simplify_for_first_call(graph);
  std::set<Way> left;
  for (const Node* n : norms_of(*graph))
    if (const auto way = ways.find(n); way != ways.end()) left.insert(way->second);
  return left;
}

WayInMethod way_in_method(const Place& place) {
  WayInMethod way = {place.node};
  for (const Scope* s = place.scope; s && (s->branch >= 0 || s->node->kind() != prim::CallMethod); s = s->parent)
    if (s->branch < 0) way.push_back(s->node);
  return way;
}

static WayInMethod way_in_method(const Way& way) {
  const auto end = std::find_if(way.begin(), way.end(), [](const Node* n) { return n->kind() == prim::CallMethod; });
  return {way.begin(), end};
}

// Whether a path of calls leads from a graph to one with such a norm.
static bool may_hold_norm(Block* block, std::map<const Graph*, bool>& known) {
  for (Node* n : block->nodes()) {
    if (updates_statistics(n)) return true;
    for (Block* b : n->blocks())
      if (may_hold_norm(b, known)) return true;
    if (n->kind() != prim::CallMethod && n->kind() != prim::CallFunction) continue;
    const auto graph = callee(n);
    if (!graph) continue;
    const auto [it, fresh] = known.try_emplace(graph.get(), false);
    if (fresh) it->second = may_hold_norm(graph->block(), known);
    if (known.at(graph.get())) return true;
  }
  return false;
}

// Tells each norm in the graphs that the passes make: a number as its eps.
static double number(size_t i) { return 0.25 + static_cast<double>(i) * 0x1p-30; }
constexpr size_t kEps = 7;

// `group`: whose block it is; null: none.
static void collect_numbers(Block* block, Node* group, std::set<double>& found) {
  for (Node* n : block->nodes()) {
    if (n->kind() == prim::DifferentiableGraph) collect_numbers(n->g(attr::Subgraph)->block(), n, found);
    for (Block* b : n->blocks()) collect_numbers(b, group, found);
    if (!updates_statistics(n)) continue;
    Value* eps = n->input(kEps);
    if (group && eps->node()->kind() == prim::Param) eps = group->input(eps->offset());
    if (const auto value = toIValue(eps)) found.insert(value->toDouble());
  }
}

// What the profiling executor does before it differentiates (runPreAutodiffPassPipeline in the same file). Those of the
// passes that find something to do drop norms that nothing uses.
static void simplify_for_differentiation(std::shared_ptr<Graph>& graph) {
  RemoveExpands(graph);
  EliminateDeadCode(graph);
  PeepholeOptimize(graph);
  ConstantPropagation(graph);
  EliminateDeadCode(graph);
  EliminateCommonSubexpression(graph);
  PeepholeOptimize(graph);
  ConstantPropagation(graph);
  ConstantPooling(graph);
  UnrollLoops(graph);
  RemoveListMutation(graph);
  PeepholeOptimize(graph);
  ConstantPropagation(graph);
  EliminateCommonSubexpression(graph);
}

// Of the norms of a graph that is ready for its first call, by number, those that run in later ones. What TorchScript
// differentiates as one runs as a whole where some of it is of use.
static std::set<size_t> run_in_later_calls(Graph& first) {
  auto graph = first.copy();
  const auto norms = norms_of(*graph);
  for (size_t i = 0; i < norms.size(); ++i) {
    WithInsertPoint here(norms[i]);
    norms[i]->replaceInput(kEps, graph->insertConstant(number(i)));
  }
  graph = ProfilingRecord::instrumentGraph(graph)->graph();
  ProfilingRecord::removeProfileCounter(graph->block());
  simplify_for_differentiation(graph);
  differentiate(graph);
  ProfilingRecord::removeProfilingNodes(graph->block());
  EliminateDeadCode(graph);
  std::set<double> numbers;
  collect_numbers(graph->block(), nullptr, numbers);
  std::set<size_t> left;
  for (size_t i = 0; i < norms.size(); ++i)
    if (numbers.count(number(i))) left.insert(i);
  return left;
}

std::set<WayInMethod> lasting_unused_norms(const Module& module) {
  const auto on_meta = estimate_on_meta();  // the passes compare constants, which may have no values
  std::map<const Graph*, bool> with_norm;
  std::map<const Graph*, Preoptimized> callees;
  std::set<WayInMethod> lasting;
  for (const ModuleClass& c : module_classes(module))
    for (Function* f : c.type->methods()) {
      const GraphFunction* function = graph_function(f);
      if (!function || !may_hold_norm(function->graph()->block(), with_norm)) continue;
      auto [graph, ways] = preoptimized(*function->graph(), callee, callees);
      simplify_for_first_call(graph);
      const auto observed = observed_values(*graph);
      const auto norms = norms_of(*graph);
      if (std::all_of(norms.begin(), norms.end(), [&](const Node* n) { return observed.count(n->output()); })) continue;
      for (const size_t i : run_in_later_calls(*graph))
        if (const auto way = ways.find(norms[i]); way != ways.end() && !observed.count(norms[i]->output()))
          lasting.insert(way_in_method(way->second));
    }
  return lasting;
}

// TorchScript drops no operator whose schema says that it overwrites an attribute, and what only overwrites the result
// of one goes all the same.
static void put_in_place(Node* norm, View& body) {
  Graph& g = *norm->owningGraph();
  const bool batch = norm->kind() == aten::batch_norm;
  WithInsertPoint here(norm);
  std::vector<Value*> inputs = norm->inputs().vec();
  inputs.push_back(g.insertConstant("identity"));
  inputs.push_back(g.insertConstant(c10::List<double>()));
  inputs.push_back(g.insertConstant(argument_of(Recompute::off)));
  const auto op = Symbol::fromQualString(batch ? "tsmem::batch_norm_act" : "tsmem::instance_norm_act");
  Node* ours = g.insertNode(g.create(op, inputs));
  ours->output()->copyMetadata(norm->output());
  norm->output()->replaceAllUsesWith(ours->output());
  const Place place = body.places.at(norm);
  body.places.erase(norm);
  body.places[ours] = place;
  body.copies[{place.scope, place.node}] = ours;
  norm->destroy();
}

bool put_unused_norms(const Graph& source, View& body, const BodyOf& body_of, const std::set<WayInMethod>& lasting) {
  std::set<Node*> kept;
  for (Node* n : norms_of(*body.graph))
    if (const auto place = body.places.find(n);
        place != body.places.end() && !in_autocast(place->second) && lasting.count(way_in_method(place->second)))
      kept.insert(n);
  std::set<Node*> never;
  const auto unused = unused_norms(*body.graph, body_of), once_read = unused_once_read(*body.graph, body_of, unused);
  if (!unused.empty() || !once_read.empty()) {
    const auto run = run_by_torchscript(source, callee), run_in_body = run_by_torchscript(*body.graph, body_of);
    for (Node* n : once_read)
      if (run.count(way_of(body.places.at(n)))) kept.insert(n);
    for (Node* n : unused) {
      const Place& place = body.places.at(n);
      const bool runs = run.count(way_of(place)) > 0;
      if (runs && !run_in_body.count({n})) kept.insert(n);
      if (!runs && run_in_body.count({n}) && !kept.count(n) && !in_autocast(place)) never.insert(n);
    }
  }
  for (Node* n : kept) put_in_place(n, body);
  for (Node* n : never) leave_out(n, body);
  return !kept.empty() || !never.empty();
}

std::optional<View> with_unused_norms(const Graph& source, Scopes& scopes,
                                      const std::unordered_set<const Scope*>& around_unused, const BodyOf& body_of,
                                      const std::set<WayInMethod>& lasting) {
  if (lasting.empty() && around_unused.empty()) return std::nullopt;
  const auto inlines_functions = [](const Scope* s) { return s->branch < 0 && s->node->kind() == prim::CallFunction; };
  const View whole = copy_graph(source, scopes, inlines_functions, callee, /*exact=*/true);
  std::unordered_set<const Scope*> around = around_unused;
  bool any = !around.empty();
  for (const auto& [n, place] : whole.places)
    if (updates_statistics(n) && !in_autocast(place) && lasting.count(way_in_method(place))) {
      any = true;
      add_with_parents(place.scope, around);
    }
  if (!any) return std::nullopt;
  View body = copy_graph(
      source, scopes, [&](const Scope* s) { return around.count(s) > 0; }, callee, /*exact=*/true);
  return put_unused_norms(source, body, body_of, lasting) ? std::optional(std::move(body)) : std::nullopt;
}

}  // namespace tsmem
