#include "rewriter/rewrite/preoptimized.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_pooling.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/peephole.h>

#include <algorithm>
#include <set>

namespace tsmem {

using namespace torch::jit;

bool updates_statistics(const Node* n) {
  if (n->kind() != aten::batch_norm && n->kind() != aten::instance_norm) return false;
  const auto training = toIValue(n->input(5));
  return n->input(3)->type()->kind() != NoneType::Kind && !(training && !training->toBool());
}

bool draws_in_place(const Node* n) {
  static const std::set<Symbol> kinds = {aten::dropout_, aten::feature_dropout_, aten::alpha_dropout_,
                                         aten::feature_alpha_dropout_, aten::rrelu_};
  return kinds.count(n->kind()) > 0;
}

bool zero_or_one(const Value* p) {
  if (const auto number = toIValue(p))
    return number->isDouble() && (number->toDouble() == 0 || number->toDouble() == 1);
  const Node* n = p->node();
  return n->kind() == prim::If && std::all_of(n->blocks().begin(), n->blocks().end(),
                                              [&](const Block* b) { return zero_or_one(b->outputs()[p->offset()]); });
}

bool draws(const Node* n) {
  if (n->kind() == aten::scaled_dot_product_attention) return !zero_or_one(n->input(4));
  if (draws_in_place(n)) return n->kind() == aten::rrelu_ || !zero_or_one(n->input(1));
  return n->kind() == aten::dropout || n->isNondeterministic();
}

static void collect(Block* block, bool (*holds)(const Node*), std::vector<Node*>& found) {
  for (Node* n : block->nodes()) {
    if (holds(n)) found.push_back(n);
    for (Block* b : n->blocks()) collect(b, holds, found);
  }
}

std::vector<Node*> nodes_where(Graph& graph, bool (*holds)(const Node*)) {
  std::vector<Node*> found;
  collect(graph.block(), holds, found);
  return found;
}

Way way_of(const Place& place) {
  Way way = {place.node};
  for (const Scope* s = place.scope; s; s = s->parent)
    if (s->branch < 0) way.push_back(s->node);
  return way;
}

// What TorchScript does with a function's graph (preoptimizeGraph in torch/csrc/jit/api/function_impl.cpp): the code of
// its callees, done with in the same way, is put in, and all of it is simplified. What there was to simplify decides
// whether it then drops norms that nothing uses.
Preoptimized preoptimized(const Graph& source, const BodyOf& body_of, std::map<const Graph*, Preoptimized>& callees) {
  const auto of_call = [&](const Node* call) -> const Preoptimized* {
    const auto graph = body_of(call);
    if (!graph) return nullptr;
    auto known = callees.find(graph.get());
    if (known == callees.end()) known = callees.emplace(graph.get(), preoptimized(*graph, body_of, callees)).first;
    return &known->second;
  };
  const auto body = [&](const Node* call) {
    const Preoptimized* of = of_call(call);
    return of ? of->graph : nullptr;
  };
  Scopes scopes;
  const View view = copy_graph(
      source, scopes, [](const Scope* s) { return s->branch < 0; }, body, /*exact=*/true);
  std::map<const Node*, Way> ways;
  for (const Node* n :
       nodes_where(*view.graph, [](const Node* n) { return updates_statistics(n) || draws_in_place(n); })) {
    const Place& place = view.places.at(n);
    Way& way = ways[n];
    way = {place.node};
    if (!place.scope) continue;
    way = of_call(place.scope->node)->ways.at(place.node);
    way.push_back(place.scope->node);
  }
  std::shared_ptr<Graph> graph = view.graph;
  PeepholeOptimize(graph, /*disable_shape_peepholes=*/true);
  ConstantPropagationImmutableTypes(graph);
  ConstantPooling(graph);
  return {graph, std::move(ways)};
}

void leave_out(Node* n, View& body) {
  std::replace(body.overwritten_unused.begin(), body.overwritten_unused.end(), n->output(), n->input(0));
  body.unused.erase(n);
  n->output()->replaceAllUsesWith(n->input(0));
  const Place place = body.places.at(n);
  body.places.erase(n);
  body.copies.erase({place.scope, place.node});
  n->destroy();
}

std::vector<Node*> dead_draws(const View& body, const Graph& source) {
  std::vector<Node*> dead;
  const auto draws = nodes_where(*body.graph, draws_in_place);
  if (draws.empty()) return dead;
  std::map<const Graph*, Preoptimized> callees;
  const auto [graph, ways] = preoptimized(source, callee, callees);
  std::set<Way> left;
  for (const Node* n : nodes_where(*graph, draws_in_place)) left.insert(ways.at(n));
  for (Node* n : draws)
    if (const auto place = body.places.find(n); place != body.places.end() && !left.count(way_of(place->second)))
      dead.push_back(n);
  return dead;
}

}  // namespace tsmem
