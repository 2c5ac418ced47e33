#include "rewriter/rewrite/sharing.h"

#include "rewriter/rewrite/order.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// Whether nothing adds to a list, or puts it elsewhere.
bool is_unpacked_only(const Value* list) {
  return std::all_of(list->uses().begin(), list->uses().end(), [](const Use& use) {
    return use.user->kind() == prim::ListUnpack ||
           (use.user->kind() == prim::Return && use.user->owningBlock()->owningNode() &&
            use.user->owningBlock()->owningNode()->kind() == prim::If);
  });
}

// Whether n takes an element out of a list of tensors, or reads it there.
bool gives_element(const Node* n) {
  return (n->kind() == aten::pop || n->kind() == aten::__getitem__) &&
         n->input(0)->type()->isSubtypeOf(*ListType::ofTensors());
}

// Whether all this is memory that is made after n has run. That is not what was there before, but for what an earlier
// iteration has left: LibTorch's analysis takes all that has been in a tuple or a list for one.
bool all_newer(const std::unordered_set<Value*>& origins, Node* n) {
  return std::all_of(origins.begin(), origins.end(), [&](Value* v) {
    return makes_fresh_tensor(v->node()) && runs_before(n, v->node()) && !in_one_loop(n, v->node());
  });
}

}  // namespace

bool Sharing::may_alias(Value* x, Value* y) {
  x = root(x), y = root(y);
  if (x == y) return true;
  const bool fresh_x = makes_fresh_tensor(x->node()), fresh_y = makes_fresh_tensor(y->node());
  if (fresh_x && fresh_y) return false;
  Origins from_x, from_y;
  const bool known_x = collect_origins(x, from_x), known_y = collect_origins(y, from_y);
  if ((known_x && all_newer(from_x.found, y->node())) || (known_y && all_newer(from_y.found, x->node()))) return false;
  const auto path_x = attribute_path(x), path_y = attribute_path(y);
  if (path_x && path_y && !path_x->empty() && !path_y->empty())
    return attributes_.alias(*path_x, *path_y) || is_set(*path_x) || is_set(*path_y);
  // The tensors that patterns take are floating point; num_batches_tracked is not.
  if ((path_x && !path_x->empty() && attributes_.integral(*path_x)) ||
      (path_y && !path_y->empty() && attributes_.integral(*path_y)))
    return false;
  if ((fresh_x && path_y && !is_set(*path_y)) || (fresh_y && path_x && !is_set(*path_x))) return false;
  if (known_x && known_y) return share_an_origin(from_x.found, from_y.found);
  const ValueSet& all = sharing(x);
  return std::any_of(all.begin(), all.end(),
                     [&](const Value* v) { return aliases().mayContainAlias(const_cast<Value*>(v), y); });
}

bool Sharing::is_set(const std::string& path) const {
  return operators_.set_attributes.count(path.substr(path.rfind('.') + 1));
}

bool Sharing::reaches(Value* written, Value* v) {
  if (may_be_tensor(v)) return may_alias(written, v);
  if (v->type()->kind() != ListType::Kind || v->type()->containedType(0)->kind() != TensorType::Kind) return false;
  if (v->node()->kind() != prim::ListConstruct) {
    const ValueSet& all = sharing(written);
    return std::any_of(all.begin(), all.end(),
                       [&](const Value* x) { return aliases().mayContainAlias(const_cast<Value*>(x), v); });
  }
  for (Value* element : v->node()->inputs())
    if (may_alias(written, element)) return true;
  return false;
}

bool Sharing::comes_from_attribute(Value* v, const std::function<bool(const std::string&)>& wanted) const {
  const auto may_be = [&](Value* x) {
    Origins origins;
    collect_origins(x, origins);
    return std::any_of(origins.found.begin(), origins.found.end(), [&](const Value* origin) {
      const auto path = attribute_path(origin);
      return path && !path->empty() && wanted(*path);
    });
  };
  if (v->node()->kind() != prim::ListConstruct) return may_be(v);
  return std::any_of(v->node()->inputs().begin(), v->node()->inputs().end(), may_be);
}

bool Sharing::is_counter(Value* v) const {
  Origins origins;
  return collect_origins(v, origins) && !origins.found.empty() &&
         std::all_of(origins.found.begin(), origins.found.end(), [&](const Value* origin) {
           const auto path = attribute_path(origin);
           return path && !path->empty() && attributes_.integral(*path);
         });
}

bool Sharing::made_here(Value* v) const {
  Origins origins;
  return collect_origins(v, origins) && std::all_of(origins.found.begin(), origins.found.end(),
                                                    [](const Value* x) { return makes_fresh_tensor(x->node()); });
}

Value* Sharing::root(Value* v) const {
  while (true) {
    auto op = operators_.canonical.find(v->node());
    if (op == operators_.canonical.end() || !op->second.in_place) return v;
    v = v->node()->input(0);
  }
}

AliasDb& Sharing::aliases() {
  if (!alias_) alias_ = std::make_unique<AliasDb>(view_.graph);
  return *alias_;
}

// v, and what an operator that may give its argument on has from its memory or gives to it: LibTorch's analysis takes
// the result of such an operator for a new tensor.
const Sharing::ValueSet& Sharing::sharing(Value* v) {
  if (sharing_.empty()) collect_givers(view_.graph->block());
  const auto [known, is_new] = sharing_.try_emplace(v, ValueSet{v});
  ValueSet& all = known->second;
  if (!is_new) return all;
  std::vector<bool> added(givers_.size());
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < givers_.size(); ++i) {
      if (added[i]) continue;
      const auto touches = [&](Value* part) {
        return std::any_of(all.begin(), all.end(),
                           [&](const Value* x) { return aliases().mayContainAlias(const_cast<Value*>(x), part); });
      };
      if (std::none_of(givers_[i].begin(), givers_[i].end(), touches)) continue;
      all.insert(givers_[i].begin(), givers_[i].end());
      added[i] = changed = true;
    }
  }
  return all;
}

// The tensors that each such operator takes and gives.
void Sharing::collect_givers(Block* block) {
  for (Node* n : block->nodes()) {
    for (Block* b : n->blocks()) collect_givers(b);
    if (!may_give_its_argument(n)) continue;
    std::vector<Value*>& shared = givers_.emplace_back();
    for (const auto& values : {n->inputs(), at::ArrayRef<Value*>(n->outputs())})
      for (Value* v : values)
        if (may_be_tensor(v) || v->type()->kind() == ListType::Kind) shared.push_back(v);
  }
}

// Adds where the memory of v, a tensor or a list of tensors, comes from: new tensors, attributes and the graph's
// inputs. False where that isn't known. LibTorch's analysis takes all that has been in a tuple or a list for one.
bool Sharing::collect_origins(Value* v, Origins& origins) const {
  v = root(v);
  if (!origins.seen.insert(v).second) return true;
  Node* n = v->node();
  const bool list = v->type()->kind() == ListType::Kind;
  if (list && !is_unpacked_only(v)) return false;
  if (v->type()->kind() == NoneType::Kind) return true;
  if (n->kind() == prim::If) {
    const auto of_branch = [&](Block* b) { return collect_origins(b->outputs()[v->offset()], origins); };
    return std::all_of(n->blocks().begin(), n->blocks().end(), of_branch);
  }
  if (n->kind() == prim::Uninitialized) return true;  // behind what raises
  // What a loop carries comes from before it and from its earlier iterations.
  if (n->kind() == prim::Loop)
    return collect_origins(n->input(2 + v->offset()), origins) &&
           collect_origins(n->blocks()[0]->outputs()[1 + v->offset()], origins);
  if (Node* loop = n->owningBlock()->owningNode();
      n->kind() == prim::Param && loop && loop->kind() == prim::Loop && v->offset() > 0)
    return collect_origins(loop->input(1 + v->offset()), origins) &&
           collect_origins(n->owningBlock()->outputs()[v->offset()], origins);
  if (!list) {
    const auto path = attribute_path(v);
    if (makes_fresh_tensor(n) || (path && !path->empty()) || n == view_.graph->param_node() ||
        (n->kind() == prim::Constant && may_be_tensor(v))) {
      origins.found.insert(v);
      return true;
    }
  }
  if (n->kind() == prim::unchecked_cast || n->kind() == prim::ListUnpack) return collect_origins(n->input(0), origins);
  if (n->kind() == prim::ListConstruct)
    return std::all_of(n->inputs().begin(), n->inputs().end(), [&](Value* x) { return collect_origins(x, origins); });
  if (gives_element(n)) return collect_origins_of_elements(n->input(0), origins);
  if (n->kind() == prim::TupleUnpack) return collect_origins_in_tuple(n->input(0), v->offset(), origins);
  return gives_part_of_first(n) && collect_origins(n->input(0), origins);
}

// Of a list that is made here and given to nothing else: what it begins with, and what is appended.
bool Sharing::collect_origins_of_elements(Value* list, Origins& origins) const {
  if (list->node()->kind() != prim::ListConstruct) return false;
  for (const Use& use : list->uses()) {
    const bool appended = use.user->kind() == aten::append && use.offset == 0;
    if (appended && !collect_origins(use.user->input(1), origins)) return false;
    if (!appended && !gives_element(use.user) && use.user->kind() != aten::len && use.user->kind() != aten::cat)
      return false;
  }
  const auto elements = list->node()->inputs();
  return std::all_of(elements.begin(), elements.end(), [&](Value* x) { return collect_origins(x, origins); });
}

bool Sharing::collect_origins_in_tuple(Value* tuple, size_t element, Origins& origins) const {
  Node* n = tuple->node();
  if (n->kind() == prim::TupleConstruct) return collect_origins(n->input(element), origins);
  if (n->kind() != prim::If) return false;
  return std::all_of(n->blocks().begin(), n->blocks().end(), [&](Block* b) {
    return collect_origins_in_tuple(b->outputs()[tuple->offset()], element, origins);
  });
}

bool Sharing::share_an_origin(const ValueSet& x, const ValueSet& y) const {
  const auto same = [&](const Value* a, const Value* b) {
    if (a == b) return true;
    if (makes_fresh_tensor(a->node()) && makes_fresh_tensor(b->node())) return false;
    const auto path_a = attribute_path(a), path_b = attribute_path(b);
    if (makes_fresh_tensor(a->node())) return path_b && is_set(*path_b);
    if (makes_fresh_tensor(b->node())) return path_a && is_set(*path_a);
    const bool attributes = path_a && path_b && !path_a->empty() && !path_b->empty();
    return !attributes || attributes_.alias(*path_a, *path_b) || is_set(*path_a) || is_set(*path_b);
  };
  return std::any_of(x.begin(), x.end(), [&](const Value* a) {
    return std::any_of(y.begin(), y.end(), [&](const Value* b) { return same(a, b); });
  });
}

}  // namespace tsmem
