#include "rewriter/rewrite/view.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/peephole_dict_idioms.h>
#include <torch/csrc/jit/passes/peephole_list_idioms.h>

#include <unordered_set>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/canonical.h"
#include "rewriter/rewrite/preoptimized.h"

namespace tsmem {

using namespace torch::jit;

std::string join_path(const std::string& a, const std::string& b) {
  return a.empty() ? b : b.empty() ? a : a + "." + b;
}

std::optional<std::string> attribute_path(const Value* v) {
  std::string path;
  while (v->node()->kind() == prim::GetAttr) {
    path = join_path(v->node()->s(attr::name), path);
    v = v->node()->input(0);
  }
  const bool is_self =
      v->node()->kind() == prim::Param && v->node()->owningBlock() == v->owningGraph()->block() && v->offset() == 0;
  if (!is_self) return std::nullopt;
  return path;
}

static bool borders(const Node* n, const char* context) {
  return (n->kind() == prim::Enter || n->kind() == prim::Exit) &&
         n->input(0)->type()->repr_str().find(context) != std::string::npos;
}

std::string module_path_of(const Place& place) {
  return join_path(place.scope ? place.scope->path : "", module_path(place.node));
}

bool borders_autocast(const Node* n) { return borders(n, "autocast"); }

bool inside_autocast(const Node* n) {
  for (; n; n = n->owningBlock()->owningNode()) {
    int blocks = 0;
    for (const Node* before : n->owningBlock()->nodes()) {
      if (before == n) break;
      if (borders_autocast(before)) blocks += before->kind() == prim::Enter ? 1 : -1;
    }
    if (blocks > 0) return true;
  }
  return false;
}

bool in_autocast(const Place& place) {
  if (inside_autocast(place.node)) return true;
  for (const Scope* s = place.scope; s; s = s->parent)
    if (inside_autocast(s->node)) return true;
  return false;
}

bool borders_no_grad(const Node* n) { return borders(n, "torch.autograd.grad_mode.no_grad"); }

std::shared_ptr<Graph> callee(const Node* call) {
  Function* function = call->kind() == prim::CallMethod ? called_method(call) : called_function(call);
  GraphFunction* graph_function = function ? tryToGraphFunction(*function) : nullptr;
  return graph_function ? graph_function->graph() : nullptr;
}

const Scope* Scopes::enter(const Scope* parent, Node* node, int branch, const Value* self) {
  auto& scope = all[{parent, node, branch}];
  if (scope) return scope.get();
  scope = std::make_unique<Scope>(Scope{parent, node, branch, parent ? parent->path : "", false, "", nullptr});
  if (branch < 0 && node->kind() == prim::CallMethod) {
    auto type = node->input(0)->type()->cast<c10::ClassType>();
    if (type && type->is_module()) {
      scope->of_module = true;
      scope->method = node->s(attr::name);
      scope->type = type;
      // The value is that of the copy, where self is the outermost method's: its path is whole.
      if (auto path = attribute_path(self)) scope->path = *path;
    }
  }
  return scope.get();
}

void add_with_parents(const Scope* s, std::unordered_set<const Scope*>& scopes) {
  for (; s; s = s->parent) scopes.insert(s);
}

std::optional<int> Scopes::branch_taken(const Scope* parent, Node* node) const {
  for (int branch : {0, 1})
    if (all.count({parent, node, branch})) return branch;
  return std::nullopt;
}

void Scopes::assume(const Scope* branch) { all.at({branch->parent, branch->node, branch->branch})->assumed = true; }

namespace {

struct Copier {
  View& view;
  Scopes& scopes;
  const std::function<bool(const Scope*)>& inlines;
  const BodyOf& body_of;
  const bool exact;
  const Contains& contains;
  std::unordered_map<const Value*, IValue> known;  // values of the copy that are constants, beyond prim::Constant
  std::unordered_set<const Value*> assumed;        // of these, what attributes say

  using Map = std::unordered_map<const Value*, Value*>;

  std::optional<IValue> constant(Value* v) {
    if (auto it = known.find(v); it != known.end()) return it->second;
    return toIValue(v);
  }

  // Conditions such as `mode != "zeros"` or `stride is None`, so that dead branches don't hide a match.
  void learn(Node* n) {
    static const std::set<Symbol> comparisons = {aten::eq,        aten::ne,          aten::lt,      aten::le,
                                                 aten::gt,        aten::ge,          aten::__not__, aten::__is__,
                                                 aten::__isnot__, aten::__contains__};
    if (!comparisons.count(n->kind())) return;
    if (n->kind() == aten::__contains__ && contains) {
      const auto path = attribute_path(n->input(0));
      const auto key = toIValue(n->input(1));
      if (path && key)
        if (const auto is_there = contains(*path, *key)) {
          known[n->output()] = *is_there;
          assumed.insert(n->output());
          return;
        }
    }
    if (n->kind() == aten::__is__ || n->kind() == aten::__isnot__) {
      const auto kind = [](Value* v) { return v->type()->kind(); };
      const bool none0 = kind(n->input(0)) == NoneType::Kind, none1 = kind(n->input(1)) == NoneType::Kind;
      const auto never_none = [&](Value* v) {
        return kind(v) != OptionalType::Kind && kind(v) != NoneType::Kind && kind(v) != AnyType::Kind;
      };
      if (none0 && none1)
        known[n->output()] = n->kind() == aten::__is__;
      else if ((none0 && never_none(n->input(1))) || (none1 && never_none(n->input(0))))
        known[n->output()] = n->kind() == aten::__isnot__;
      return;
    }
    for (Value* v : n->inputs())
      if (!toIValue(v)) {
        if (n->kind() != aten::__not__ || !known.count(v)) return;
        known[n->output()] = !known[v].toBool();
        if (assumed.count(v)) assumed.insert(n->output());
        return;
      }
    if (auto stack = runNodeIfInputsAreConstant(n); stack && stack->size() == 1) known[n->output()] = stack->front();
  }

  void copy_block(const Block* from, Block* to, Map& map, const Scope* scope) {
    for (Node* n : const_cast<Block*>(from)->nodes()) copy_node(n, to, map, scope);
  }

  // The caller's name for a result is the better one to read; what merely passes through keeps its own.
  void finish_inlined(Node* n, const Block* contents, Map& inner, Map& map, const Scope* inner_scope) {
    for (size_t i = 0; i < n->outputs().size(); ++i) {
      Value* out = inner.at(contents->outputs()[i]);
      map[n->output(i)] = out;
      auto place = view.places.find(out->node());
      if (n->output(i)->hasDebugName() && place != view.places.end() && within(place->second.scope, inner_scope))
        out->setDebugName(n->output(i)->debugNameBase());
    }
  }

  static bool within(const Scope* scope, const Scope* outer) {
    for (; scope; scope = scope->parent)
      if (scope == outer) return true;
    return false;
  }

  // TorchScript itself takes the dimensions of a convolution's output for known (passes/peephole_alias_sensitive.cpp),
  // and so drops one that only its number of dimensions is asked of.
  static std::optional<int64_t> dims_of_convolution(const Node* n, const Map& map) {
    if (n->kind() != aten::dim) return std::nullopt;
    const Value* of = map.at(n->input());
    for (const Use& use : of->uses())
      if (const FunctionSchema* schema = use.user->maybeSchema(); schema && schema->is_mutable()) return std::nullopt;
    const Symbol kind = of->node()->kind();
    if (kind == aten::conv1d) return 3;
    if (kind == aten::conv2d) return 4;
    if (kind == aten::conv3d) return 5;
    return std::nullopt;
  }

  void copy_node(Node* n, Block* to, Map& map, const Scope* scope) {
    if (n->kind() == prim::CallMethod || n->kind() == prim::CallFunction) {
      if (auto graph = body_of(n)) {
        const Scope* inner_scope = scopes.enter(scope, n, -1, map.at(n->input(0)));
        if (inlines(inner_scope)) {
          view.entered.insert(inner_scope);
          Map inner;
          const size_t skip = n->kind() == prim::CallFunction ? 1 : 0;
          for (size_t i = skip; i < n->inputs().size(); ++i) inner[graph->inputs()[i - skip]] = map.at(n->input(i));
          for (const Value* in : graph->inputs()) view.arguments[inner_scope].push_back(inner.at(in));
          copy_block(graph->block(), to, inner, inner_scope);
          finish_inlined(n, graph->block(), inner, map, inner_scope);
          return;
        }
      }
    } else if (n->kind() == prim::If) {
      // An earlier copy may have known the condition from a call that is not inlined in this one.
      std::optional<int> branch = scopes.branch_taken(scope, n);
      if (auto condition = constant(map.at(n->input(0))); !branch && condition && condition->isBool())
        branch = condition->toBool() ? 0 : 1;
      if (branch) {
        const Scope* inner_scope = scopes.enter(scope, n, *branch, nullptr);
        if (assumed.count(map.at(n->input(0)))) scopes.assume(inner_scope);
        if (inlines(inner_scope)) {
          view.entered.insert(inner_scope);
          if (inner_scope->assumed) view.assumptions.emplace_back(map.at(n->input(0)), *branch);
          copy_block(n->blocks()[*branch], to, map, inner_scope);
          finish_inlined(n, n->blocks()[*branch], map, map, inner_scope);
          return;
        }
      }
    }
    if (const auto dims = exact ? std::nullopt : dims_of_convolution(n, map)) {
      WithInsertPoint at_end(to);
      map[n->output()] = view.graph->insertConstant(*dims);
      return;
    }
    Node* copy = view.graph->createClone(
        n, [&](Value* v) { return map.at(v); }, /*copy_blocks=*/false);
    to->appendNode(copy);
    for (size_t i = 0; i < n->outputs().size(); ++i) map[n->output(i)] = copy->output(i);
    for (Block* b : n->blocks()) {
      Block* inner_block = copy->addBlock();
      for (Value* in : b->inputs()) map[in] = inner_block->addInput()->copyMetadata(in);
      copy_block(b, inner_block, map, scope);
      for (Value* out : b->outputs()) inner_block->registerOutput(map.at(out));
    }
    view.places[copy] = {scope, n};
    view.copies[{scope, n}] = copy;
    if (n->outputs().size() == 1 && n->blocks().empty()) learn(copy);
  }
};

}  // namespace

View copy_graph(const Graph& source, Scopes& scopes, const std::function<bool(const Scope*)>& inlines,
                const BodyOf& body_of, bool exact, const Contains& contains) {
  View view{std::make_shared<Graph>(), {}, {}, {}, {}, {}, {}, {}};
  Copier copier{view, scopes, inlines, body_of, exact, contains, {}, {}};
  Copier::Map map;
  for (const Value* in : source.inputs()) map[in] = view.graph->addInput()->copyMetadata(const_cast<Value*>(in));
  copier.copy_block(source.block(), view.graph->block(), map, nullptr);
  for (const Value* out : source.outputs()) view.graph->registerOutput(map.at(out));
  return view;
}

// Whether something is overwritten, other than a buffer, and then not used: LibTorch's analysis of aliases, which takes
// long for large graphs, may find that nobody sees it.
static bool overwrites_unused(Block* block) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks())
      if (overwrites_unused(b)) return true;
    const FunctionSchema* schema = n->maybeSchema();
    if (schema && schema->is_mutable() && !n->hasUses() && n->input(0)->node()->kind() != prim::GetAttr) return true;
  }
  return false;
}

static std::unordered_set<const Value*> all_values(Block* block) {
  std::unordered_set<const Value*> values(block->inputs().begin(), block->inputs().end());
  for (Node* n : block->nodes()) {
    values.insert(n->outputs().begin(), n->outputs().end());
    for (Block* inner : n->blocks()) values.merge(all_values(inner));
  }
  return values;
}

// What a value is a view of, or may be, as far as operators take it first; of what branches and loops give, all of it.
static void collect_viewed(Value* v, std::unordered_set<Value*>& viewed) {
  while (viewed.insert(v).second) {
    Node* n = v->node();
    if (n->kind() == prim::If || n->kind() == prim::Loop) {
      const size_t first = n->kind() == prim::Loop ? 1 : 0;  // its block's first output is whether it goes on
      for (Block* b : n->blocks()) collect_viewed(b->outputs()[first + v->offset()], viewed);
      if (n->kind() == prim::Loop) collect_viewed(n->input(2 + v->offset()), viewed);
      return;
    }
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || n->inputs().empty() || v->offset() >= schema->returns().size() ||
        (!schema->returns()[v->offset()].alias_info() && !may_give_its_argument(n)))
      return;
    v = n->input(0);
  }
}

static void collect_overwritten(Block* block, std::vector<std::pair<Node*, Value*>>& found) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) collect_overwritten(b, found);
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || !schema->is_mutable() || n->inputs().empty()) continue;
    std::unordered_set<Value*> viewed;
    collect_viewed(n->input(0), viewed);
    for (Value* v : viewed) found.emplace_back(n, v);
  }
}

// Whether a list, dictionary or tuple is asked for something right where it is made.
static bool looks_into_new_container(Block* block) {
  static const std::set<Symbol> constructs = {prim::ListConstruct, prim::DictConstruct, prim::TupleConstruct};
  static const std::set<Symbol> looks = {aten::len,        aten::__getitem__, aten::slice,      aten::add,
                                         prim::ListUnpack, prim::TupleUnpack, prim::TupleIndex, prim::TupleSlice};
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks())
      if (looks_into_new_container(b)) return true;
    if (looks.count(n->kind()) && constructs.count(n->input(0)->node()->kind())) return true;
  }
  return false;
}

static std::unordered_set<const Node*> all_nodes(Block* block) {
  std::unordered_set<const Node*> nodes;
  const std::function<void(Block*)> visit = [&](Block* b) {
    for (Node* n : b->nodes()) {
      nodes.insert(n);
      for (Block* inner : n->blocks()) visit(inner);
    }
  };
  visit(block);
  return nodes;
}

// Gives each norm that may update statistics a block with a print, so that it counts as something that has an effect. A
// use of its result would make what overwrites that result count too.
static void hold_norms(Block* block, std::vector<Node*>& held) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) hold_norms(b, held);
    if (!updates_statistics(n)) continue;
    WithInsertPoint inside(n->addBlock());
    n->blocks()[0]->registerOutput(n->owningGraph()->insertConstant(0));
    n->owningGraph()->insertNode(n->owningGraph()->create(prim::Print, 0));
    held.push_back(n);
  }
}

// Adds n, where nothing uses its results but `unused` nodes, and what is so by that.
static void add_unused(Node* n, std::unordered_set<const Node*>& unused) {
  for (const Value* v : n->outputs())
    for (const Use& use : v->uses())
      if (!unused.count(use.user)) return;
  if (!n->blocks().empty() || n->kind() == prim::Param || !unused.insert(n).second) return;
  for (Value* v : n->inputs()) add_unused(v->node(), unused);
}

std::unordered_set<const Scope*> remove_dead_code(View& view, UnusedNorms norms) {
  std::unordered_set<const Scope*> dead;
  const auto forget_dead = [&] {  // before new nodes are made, which may get the addresses of dead ones
    const auto alive = all_nodes(view.graph->block());
    for (const auto& [copy, place] : view.places) {
      if (alive.count(copy)) continue;
      const auto outputs = place.node->outputs();
      if (std::any_of(outputs.begin(), outputs.end(), [](const Value* v) {
            return v->type()->isSubtypeOf(*TensorType::get()) && v->node()->kind() != prim::GetAttr;
          }))
        dead.insert(place.scope);
    }
    std::erase_if(view.places, [&](const auto& entry) { return !alive.count(entry.first); });
    std::erase_if(view.copies, [&](const auto& entry) { return !alive.count(entry.second); });
  };
  std::vector<Node*> held;
  if (norms == UnusedNorms::stay) hold_norms(view.graph->block(), held);
  EliminateDeadCode(view.graph->block());
  std::vector<std::pair<Node*, Value*>> overwritten;
  if (overwrites_unused(view.graph->block())) {
    collect_overwritten(view.graph->block(), overwritten);
    EliminateDeadCode(view.graph);
    EliminateDeadCode(view.graph->block());
    const auto alive = all_nodes(view.graph->block());
    std::erase_if(overwritten, [&](const auto& write) { return alive.count(write.first) > 0; });
  }
  forget_dead();
  if (looks_into_new_container(view.graph->block())) {
    PeepholeOptimizeListIdioms(view.graph);
    PeepholeOptimizeDictIdioms(view.graph);
    LowerSimpleTuples(view.graph->block());
    EliminateDeadCode(view.graph->block());
    forget_dead();
  }
  for (Node* n : held) n->eraseBlock(0);
  if (!overwritten.empty()) {
    const auto alive = all_values(view.graph->block());
    for (const auto& [n, v] : overwritten)
      if (alive.count(v)) view.overwritten_unused.push_back(v);
  }
  for (Node* n : held) add_unused(n, view.unused);
  return dead;
}

}  // namespace tsmem
