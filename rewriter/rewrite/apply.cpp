#include "rewriter/rewrite/apply.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <set>
#include <unordered_set>

#include "ops/traits.h"
#include "rewriter/graph/origin.h"
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/operators.h"
#include "rewriter/rewrite/preoptimized.h"

namespace tsmem {

using namespace torch::jit;

// A match told from all others of a view. A dropout that draws otherwise is another match, and so is an op that may not
// offer its output.
static auto identity(const FoundMatch& f, const std::vector<Place>& nodes) {
  std::vector<std::pair<const Scope*, Node*>> places;
  for (const Place& p : nodes) places.emplace_back(p.scope, p.node);
  return std::make_tuple(f.rule, std::move(places), f.draws, f.overwritten_by.empty(), f.in_place, f.act_in_place,
                         f.draws_for_others, f.makes_new.empty());
}

// Where a callee's place is in a caller's view, in which the callee was entered by `call`; null where it was not
// copied.
static std::optional<Place> within(const Scope* call, const Place& p, const Scopes& scopes) {
  std::vector<const Scope*> way;
  for (const Scope* s = p.scope; s; s = s->parent) way.push_back(s);
  const Scope* at = call;
  for (auto s = way.rbegin(); s != way.rend(); ++s) {
    auto it = scopes.all.find({at, (*s)->node, (*s)->branch});
    if (it == scopes.all.end()) return std::nullopt;
    at = it->second.get();
  }
  return Place{at, p.node};
}

// Whether a call's result is one of its own arguments, as nn.Identity's is.
static bool returns_argument(const Node* call) {
  const auto graph = callee(call);
  return graph && graph->outputs().size() == 1 &&
         (graph->outputs()[0]->node()->kind() == prim::Param ||
          (graph->outputs()[0]->node()->kind() == prim::CallMethod && returns_argument(graph->outputs()[0]->node())));
}

Choice choose_matches(const std::vector<FoundMatch>& allowed, const std::vector<FoundMatch>& all,
                      const std::set<std::pair<const Scope*, Node*>>& copied,
                      const std::unordered_set<const Scope*>& inlined, const Scopes& scopes,
                      const MatchesOf& matches_of, const MatchesOf& allowed_of) {
  using Identity = decltype(identity(allowed[0], {}));
  std::set<Identity> here;
  for (const FoundMatch& f : all) here.insert(identity(f, f.nodes));
  // A callee's match, as it would be in this view; null where not all of its nodes are.
  const auto seen_from_here = [&](const FoundMatch& f, const Scope* call) -> std::optional<std::vector<Place>> {
    std::vector<Place> nodes;
    for (const Place& p : f.nodes) {
      const auto place = within(call, p, scopes);
      if (!place || !copied.count({place->scope, place->node})) return std::nullopt;
      nodes.push_back(*place);
    }
    return nodes;
  };
  std::unordered_set<const Scope*> calls;
  for (const auto& [scope, node] : copied)
    for (const Scope* s = scope; s && calls.insert(s).second; s = s->parent) continue;
  Choice choice{{}, inlined};
  std::unordered_map<const Scope*, std::set<Identity>> of_call;
  std::unordered_set<const Scope*> differing;  // calls whose callee has a match that this view has not
  for (const Scope* s : calls) {
    if (!s->of_module) continue;
    const std::vector<FoundMatch>* theirs = matches_of(s->type.get(), s->method);
    if (!theirs) continue;
    for (const FoundMatch& f : *theirs)
      if (const auto nodes = seen_from_here(f, s))
        if (const auto id = identity(f, *nodes); here.count(id)) of_call[s].insert(id);
    // What is left out there is never applied, and no reason to inline the call.
    for (const FoundMatch& f : *allowed_of(s->type.get(), s->method))
      if (const auto nodes = seen_from_here(f, s); nodes && !here.count(identity(f, *nodes))) differing.insert(s);
  }
  // Of the module calls around a scope that stay calls; null: none.
  const auto outermost_call = [&](const Scope* scope) {
    const Scope* outermost = nullptr;
    for (const Scope* s = scope; s; s = s->parent)
      if (s->of_module && !choice.inlined.count(s)) outermost = s;
    return outermost;
  };
  const auto left_to_callee = [&](const FoundMatch& f) {
    const Scope* call = outermost_call(f.scope);
    return call && of_call[call].count(identity(f, f.nodes)) > 0;
  };
  std::vector<bool> ours(allowed.size());
  // A match that crosses a call inlines it, which brings in the matches inside that call.
  for (bool changed = true; changed;) {
    changed = false;
    for (const Scope* s : differing)
      if (outermost_call(s) == s) {
        add_with_parents(s, choice.inlined);
        changed = true;
      }
    for (size_t i = 0; i < allowed.size(); ++i) {
      if (ours[i] || left_to_callee(allowed[i])) continue;
      ours[i] = changed = true;
      for (const Place& p : allowed[i].nodes) add_with_parents(p.scope, choice.inlined);
      for (const Reader& r : allowed[i].readers) add_with_parents(r.user.scope, choice.inlined);
    }
    // Where anything changes, calls that return their own argument are seen through, as the view does: a match may
    // have reached a value by them.
    const bool rewritten = !choice.inlined.empty() || std::find(ours.begin(), ours.end(), true) != ours.end();
    for (const Scope* s : calls)
      if (rewritten && s->branch < 0 && (!s->parent || choice.inlined.count(s->parent)) && returns_argument(s->node))
        changed |= choice.inlined.insert(s).second;
  }
  for (size_t i = 0; i < allowed.size(); ++i)
    if (ours[i]) choice.matches.push_back(&allowed[i]);
  return choice;
}

// Whether an operator of this library has an argument that the rewriter gives.
bool takes(const std::string& op, const std::string& argument) {
  if (!op.starts_with("tsmem::")) return false;
  for (const auto& o : getAllOperatorsFor(Symbol::fromQualString(op)))
    for (const auto& a : o->schema().arguments())
      if (a.name() == argument) return true;
  return false;
}

namespace {

// Destroys nodes that only fed what was replaced.
void remove_unused(Node* n) {
  if (n->hasUses() || !n->blocks().empty()) return;
  static const std::set<Symbol> removable = {prim::Constant, prim::GetAttr, prim::ListConstruct};
  if (!removable.count(n->kind())) return;
  std::vector<Node*> sources;
  for (Value* v : n->inputs()) sources.push_back(v->node());
  n->destroy();
  std::set<Node*> distinct(sources.begin(), sources.end());
  for (Node* s : distinct) remove_unused(s);
}

// A list without elements is a node: saved code gives it its element type only there.
Value* constant(Graph& g, const IValue& value, const TypePtr& type) {
  if (value.isList() && value.toListRef().empty())
    return g.insertNode(g.createList(type->containedType(0), {}))->output();
  return g.insertConstant(value);
}

// Adds the defaults of arguments that a line leaves out, as the first overload has them that takes what it gives.
void add_defaults(Graph& g, const std::string& op, std::vector<Value*>& arguments) {
  const size_t given = arguments.size();
  const auto takes_given = [&](const std::vector<c10::Argument>& formals) {
    bool takes = formals.size() >= given;
    for (size_t i = 0; i < given && takes; ++i) takes = arguments[i]->type()->isSubtypeOf(*formals[i].type());
    for (size_t i = given; i < formals.size() && takes; ++i) takes = formals[i].default_value().has_value();
    return takes;
  };
  const auto overloads = getAllOperatorsFor(Symbol::fromQualString(op));
  for (const auto& o : overloads)
    if (o->schema().arguments().size() == given && takes_given(o->schema().arguments())) return;
  for (const auto& o : overloads) {
    const auto& formals = o->schema().arguments();
    if (!takes_given(formals)) continue;
    for (size_t i = given; i < formals.size(); ++i)
      arguments.push_back(constant(g, *formals[i].default_value(), formals[i].type()));
    return;
  }
}

// A number that tracing has made a tensor is one again: TorchScript does so with the second operand of these operators
// (CanonicalizeOps), and a tensor would decide the result's dtype.
void restore_number(Graph& g, const std::string& op, std::vector<Value*>& arguments) {
  static const std::set<std::string> arithmetic = {"tsmem::add", "tsmem::sub", "tsmem::mul", "tsmem::div"};
  if (arithmetic.count(op) && arguments.size() > 1 && may_be_tensor(arguments[1]))
    if (const auto number = traced_number(arguments[1])) arguments[1] = g.insertConstant(*number);
}

// Puts one line's op before `at`.
Node* put_line(Graph& g, const Line& line, Node* at, const std::map<std::string, Value*>& values, const FoundMatch& f,
               const RecomputeValue& recompute) {
  WithInsertPoint here(at);
  std::vector<Value*> arguments;
  for (const std::string& a : line.arguments) {
    if (a == "ACT") {
      arguments.push_back(g.insertConstant(f.act.empty() ? std::string("identity") : f.act));
      // A list node, not a constant: saved code gives an empty list its element type only there.
      std::vector<Value*> elements;
      for (double x : f.act_args) elements.push_back(g.insertConstant(x));
      arguments.push_back(g.insertNode(g.createList(FloatType::get(), elements))->output());
    } else if (a == "DRAWS") {
      arguments.push_back(g.insertConstant(f.draws));
    } else {
      arguments.push_back(is_value(a) ? values.at(a.substr(1)) : g.insertConstant(*literal_value(a)));
    }
  }
  restore_number(g, line.op, arguments);
  if (offers_recompute(line.op) != Offers::nothing) arguments.push_back(recompute(g, line.op, f));
  if (takes(line.op, "act_in_place")) arguments.push_back(g.insertConstant(f.act_in_place));
  if (takes(line.op, "in_place")) arguments.push_back(g.insertConstant(f.in_place));
  // Without that list the overload is called that counts as having an effect, and which nobody removes.
  // One that is not empty asks for a new tensor.
  if (takes(line.op, "draw") && !f.draws_for_others) {
    std::vector<Value*> elements;
    if (!f.makes_new.empty()) elements.push_back(g.insertConstant(1));
    arguments.push_back(g.insertNode(g.createList(IntType::get(), elements))->output());
  }
  add_defaults(g, line.op, arguments);
  Node* n = g.insertNode(g.create(Symbol::fromQualString(line.op), arguments, line.outputs.size()));
  n->setSourceRange(at->sourceRange());
  take_path(n, at);
  if (!n->maybeSchema())
    throw std::logic_error(
        fmt::format("the pattern {} gives {} arguments that it does not take", f.pattern->name, line.op));
  for (size_t k = 0; k < line.outputs.size(); ++k) n->output(k)->setType(n->schema().returns()[k].type());
  return n;
}

// One size alone, from an operator like `sizes`.
Value* size_at(Graph& g, Node* sizes, Value* dim, const Value* before) {
  std::vector<Value*> arguments = sizes->inputs().vec();
  arguments.push_back(dim);
  Value* size = g.insertNode(g.create(sizes->kind(), arguments, 1))->output()->setType(IntType::get());
  if (before->hasDebugName()) size->setDebugName(before->debugNameBase());
  return size;
}

// Users that only ask for the sizes of an inner value ask `sizes` instead, as that value is no longer made.
void reroute_sizes(Graph& g, const Rule& rule, Value* inner, Node* sizes) {
  for (const Use& use : std::vector<Use>(inner->uses())) {
    Node* n = use.user;
    if (!asks_for_sizes(n, rule)) continue;
    WithInsertPoint here(n);
    Value* v = n->kind() == aten::dim        ? g.insert(aten::len, {sizes->output()})
               : n->kind() == aten::sym_size ? size_at(g, sizes, n->input(1), n->output())
               : n->inputs().size() == 2     ? g.insert(aten::__getitem__, {sizes->output(), n->input(1)})
                                             : sizes->output();
    n->output()->replaceAllUsesWith(v);
    n->destroy();
  }
  if (!sizes->hasUses()) sizes->destroy();
}

void put(Graph& g, const View& copy, const FoundMatch& f, const RecomputeValue& recompute) {
  std::vector<Node*> nodes;
  for (const Place& p : f.nodes) nodes.push_back(copy.copies.at({p.scope, p.node}));
  std::map<std::string, Value*> values;
  for (const auto& [name, o] : f.values)
    values[name] = o.output ? nodes[o.node]->output(o.index) : nodes[o.node]->input(o.index);
  const std::vector<Line> match = parse_lines(f.rule->match), rewrite = rewrite_lines(f.rule->rewrite);
  std::map<std::string, Value*> made;
  for (const Line& line : rewrite) {
    size_t at = 0;
    while (at < match.size() && match[at].outputs[0] != line.outputs[0]) ++at;
    TORCH_INTERNAL_ASSERT(at < match.size(), "a pattern's rewrite defines %", line.outputs[0],
                          ", which its match does not");
    std::map<std::string, Value*> operands = values;
    for (auto& [name, v] : made) operands[name] = v;
    Node* n = put_line(g, line, nodes[at], operands, f, recompute);
    for (size_t k = 0; k < line.outputs.size(); ++k) {
      made[line.outputs[k]] = n->output(k);
      auto old = f.values.find(line.outputs[k]);
      if (old != f.values.end() && old->second.output && values[old->first]->hasDebugName())
        n->output(k)->setDebugName(values[old->first]->debugNameBase());
    }
  }
  if (!f.rule->sizes.empty()) {
    const Line line = parse_lines(f.rule->sizes).front();
    Value* inner = values.at(line.outputs[0]);
    if (inner->uses().size() > 1)
      reroute_sizes(g, *f.rule, inner, put_line(g, line, inner->node(), values, f, recompute));
  }
  for (auto& [name, v] : made) {
    auto old = f.values.find(name);
    if (old != f.values.end() && old->second.output) values.at(name)->replaceAllUsesWith(v);
  }
  for (auto n = nodes.rbegin(); n != nodes.rend(); ++n) {
    std::set<Node*> sources;
    for (Value* v : (*n)->inputs()) sources.insert(v->node());
    (*n)->destroy();
    for (Node* s : sources)
      if (std::find(nodes.begin(), nodes.end(), s) == nodes.end()) remove_unused(s);
  }
}

constexpr std::ptrdiff_t kMostChecked = 5000;

// Gives values of one name, or of none, after the first hundred, a name of their own. LibTorch numbers them when it
// prints code, and tries all numbers from 0 for each. What is used once has no name in code.
void number_names(Graph& graph) {
  std::map<std::string, int> seen;
  const std::function<void(Block*)> visit = [&](Block* b) {
    for (Node* n : b->nodes()) {
      for (Value* v : n->outputs()) {
        if (!v->hasDebugName() && v->uses().size() == 1 && n->outputs().size() == 1) continue;
        const std::string base = v->hasDebugName() ? v->debugNameBase() : "v";
        if (const int k = ++seen[base]; k > 100) v->setDebugName(base + "_" + std::to_string(k));
      }
      for (Block* inner : n->blocks()) visit(inner);
    }
  };
  visit(graph.block());
}

}  // namespace

Offers offers_recompute(const std::string& op) {
  if (!takes(op, "recompute")) return Offers::nothing;
  return traits_of(op).expensive ? Offers::expensive : Offers::cheap;
}

// Users, outside their match, of values that are no longer made, in a copy that leaves calls as they are; those that
// ask for sizes aside.
static std::vector<Node*> strangers(const View& copy, const std::vector<const FoundMatch*>& matches) {
  std::vector<Node*> users;
  for (const FoundMatch* f : matches) {
    std::set<std::string> made;
    for (const Line& line : rewrite_lines(f->rule->rewrite)) made.insert(line.outputs.begin(), line.outputs.end());
    std::vector<Node*> nodes;
    for (const Place& p : f->nodes) nodes.push_back(copy.copies.at({p.scope, p.node}));
    std::set<const Value*> replaced;
    for (const auto& [name, o] : f->values)
      if (o.output && made.count(name)) replaced.insert(nodes[o.node]->output(o.index));
    for (Node* n : nodes)
      for (const Value* v : n->outputs())
        for (const Use& use : v->uses()) {
          const bool inside = std::find(nodes.begin(), nodes.end(), use.user) != nodes.end();
          if (!replaced.count(v) && !inside && !asks_for_sizes(use.user, *f->rule)) users.push_back(use.user);
        }
  }
  return users;
}

// Calls and constant branches around a node of a copy that the copy has left as they are.
static void add_calls_around(const Node* n, const View& copy, const Scopes& scopes,
                             std::unordered_set<const Scope*>& wanted) {
  for (; n; n = n->owningBlock()->owningNode()) {
    const auto place = copy.places.find(n);
    if (place == copy.places.end()) continue;
    for (int branch : {-1, 0, 1})
      if (auto it = scopes.all.find({place->second.scope, place->second.node, branch}); it != scopes.all.end())
        wanted.insert(it->second.get());
  }
}

// Raises where an attribute that decides a branch is no more what it was.
static void guard_assumptions(View& copy) {
  Graph& g = *copy.graph;
  for (const auto& [condition, branch] : copy.assumptions) {
    const Node* asks = condition->node();
    while (asks->kind() == aten::__not__) asks = asks->input(0)->node();
    Node* guard = g.create(prim::If, {condition}, 0)->insertAfter(condition->node());
    for (int i : {0, 1}) {
      WithInsertPoint inside(guard->addBlock());
      if (i == branch) continue;
      Value* message = g.insertConstant(
          fmt::format("tsmem: {} is not what it was when this model was rewritten; rewrite the original again",
                      attribute_path(asks->input(0)).value_or("an attribute")));
      Value* none = g.insertConstant(c10::IValue());
      g.insertNode(g.create(prim::RaiseException, {message, none}, 0));
    }
  }
}

std::optional<View> apply_matches(const Graph& source, Scopes& scopes, const Choice& choice,
                                  const std::set<std::pair<const Scope*, Node*>>& passes_on,
                                  const std::unordered_set<const Scope*>& dead, const RecomputeValue& recompute) {
  std::unordered_set<const Scope*> wanted = choice.inlined;
  const bool redirects = std::any_of(choice.matches.begin(), choice.matches.end(),
                                     [](const FoundMatch* f) { return !f->readers.empty(); });
  // A constant branch inside an inlined call is folded too, and a call without a node of its own (nn.Identity) goes;
  // every constant branch where uses are redirected, as a value may have passed through it.
  const auto inlines = [&](const Scope* s) {
    const bool in_ours = s->parent == nullptr || wanted.count(s->parent) > 0;
    return wanted.count(s) > 0 || (s->branch >= 0 && (redirects || s->parent != nullptr) && in_ours) ||
           (s->branch < 0 && in_ours && returns_argument(s->node));
  };
  const auto copied = [&]() -> std::optional<View> {
    View copy = copy_graph(source, scopes, inlines);
    for (const FoundMatch* f : choice.matches)
      if (!read_results(copy, f->readers)) return std::nullopt;
    for (const auto& place : passes_on)
      if (const auto n = copy.copies.find(place); n != copy.copies.end()) leave_out(n->second, copy);
    guard_assumptions(copy);
    return copy;
  };
  std::optional<View> made = copied();
  if (!made) return std::nullopt;
  View copy = std::move(*made);
  // In the view these calls do not use what they are given, or ask for its size alone, or are never run.
  bool tried = false;
  for (auto users = strangers(copy, choice.matches); !users.empty(); users = strangers(copy, choice.matches)) {
    const size_t before = wanted.size();
    for (const Node* n : users) add_calls_around(n, copy, scopes, wanted);
    for (const Scope* s : dead) add_with_parents(s, wanted);
    if (std::exchange(tried, true) && wanted.size() == before) return std::nullopt;
    if (!(made = copied())) return std::nullopt;
    copy = std::move(*made);
    remove_dead_code(copy, UnusedNorms::stay);
  }
  for (const FoundMatch* f : choice.matches) put(*copy.graph, copy, *f, recompute);
  number_names(*copy.graph);
  // The check takes seconds for thousands of branches, as each looks at all nodes.
  const auto nodes = copy.graph->nodes();
  if (std::distance(nodes.begin(), nodes.end()) < kMostChecked) copy.graph->lint();
  return copy;
}

}  // namespace tsmem
