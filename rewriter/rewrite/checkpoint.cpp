#include "rewriter/rewrite/checkpoint.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/ir.h>

#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/canonical.h"
#include "rewriter/rewrite/preoptimized.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

std::set<std::string> checkpointed_paths(const std::vector<ModuleClass>& classes,
                                         const std::vector<std::string>& globs) {
  std::set<std::string> found;
  for (const std::string& glob : globs) {
    bool any = false;
    for (const ModuleClass& c : classes)
      for (const std::string& path : c.paths)
        if (!path.empty() && glob_match(glob, path)) {
          found.insert(path);
          any = true;
        }
    if (!any) throw Error(ErrorKind::request, fmt::format("No module to checkpoint matches '{}'", glob), "modules");
  }
  std::set<std::string> outermost;
  for (const std::string& path : found) {
    bool inside = false;
    for (size_t dot = path.rfind('.'); dot != std::string::npos && dot > 0; dot = path.rfind('.', dot - 1))
      inside |= found.count(path.substr(0, dot)) > 0;
    if (!inside) outermost.insert(path);
  }
  return outermost;
}

bool is_checkpointed(const std::set<std::string>& checkpointed, const ModuleClass& c, const std::string& inner) {
  std::string in, out;
  for (const std::string& path : c.paths)
    (checkpointed.count(join_path(path, inner)) ? in : out) = join_path(path, inner);
  if (!in.empty() && !out.empty())
    throw Error(ErrorKind::request,
                fmt::format("{} is to be checkpointed but not {}, which is called by the same code: name both or "
                            "neither",
                            in, out));
  return !in.empty();
}

static bool is_container(const Value* v) { return !is_tensor(v) && !v->type()->containedTypes().empty(); }

// Operators whose result may be their argument itself, whatever their schemas say: a dropout's is in evaluation.
static bool passes_on(const Node* n) {
  static const std::set<Symbol> kinds = {prim::ListUnpack, prim::TupleUnpack, prim::TupleIndex, prim::unchecked_cast};
  return may_give_its_argument(n) || kinds.count(n->kind()) > 0;
}

// Where a value's memory may come from; several of these.
enum Origin { own = 0, argument = 1, container = 2 };  // container: an attribute that is a list or dictionary

static int origins(const Value* v, std::unordered_set<const Value*>& seen) {
  if (!seen.insert(v).second) return own;
  const Node* n = v->node();
  if (n->kind() == prim::Param) {
    const Node* around = n->owningBlock()->owningNode();
    if (!around) return v->offset() > 0 ? argument : own;
    if (around->kind() != prim::Loop || v->offset() == 0) return own;
    return origins(around->inputs()[v->offset() + 1], seen) | origins(n->owningBlock()->outputs()[v->offset()], seen);
  }
  if (n->kind() == prim::GetAttr) return is_tensor(v) ? own : container;
  if (n->kind() == prim::If)
    return origins(n->blocks()[0]->outputs()[v->offset()], seen) |
           origins(n->blocks()[1]->outputs()[v->offset()], seen);
  if (n->kind() == prim::Loop)
    return origins(n->inputs()[v->offset() + 2], seen) | origins(n->blocks()[0]->outputs()[v->offset() + 1], seen);
  const FunctionSchema* schema = n->maybeSchema();
  const bool alias =
      schema && v->offset() < schema->returns().size() && schema->returns()[v->offset()].alias_info() != nullptr;
  if (n->inputs().empty() || (!alias && !passes_on(n))) return own;
  static const std::set<Symbol> constructs = {prim::ListConstruct, prim::TupleConstruct, prim::DictConstruct};
  int all = own;
  for (const Value* input : alias ? n->inputs().slice(0, 1) : n->inputs()) {
    if (!is_tensor(input) && !is_container(input) && input != n->input(0)) continue;
    if (!constructs.count(input->node()->kind()))
      all |= origins(input, seen);
    else if (is_tensor(v) || may_give_its_argument(n))  // one of its elements
      for (const Value* element : input->node()->inputs()) all |= origins(element, seen);
  }
  return all;
}

// Why a method can't be run again; empty where it can. tsmem::checkpoint checks at run time what can't be seen here.
static std::string runs_once(const Graph& method) {
  Scopes scopes;
  const View view = copy_graph(method, scopes, [](const Scope*) { return true; });
  std::function<std::string(Block*)> why = [&](Block* b) -> std::string {
    for (Node* n : b->nodes()) {
      const bool of_local = n->kind() == prim::SetAttr && n->input(0)->node()->kind() == prim::CreateObject;
      if (n->kind() == prim::SetAttr && !of_local) return "sets attributes";
      const FunctionSchema* schema = n->maybeSchema();
      if (schema && schema->is_mutable())
        for (size_t k = 0; k < schema->arguments().size() && k < n->inputs().size(); ++k) {
          const auto* alias = schema->arguments()[k].alias_info();
          if (!alias || !alias->isWrite()) continue;
          std::unordered_set<const Value*> seen;
          const int from = origins(n->input(k), seen);
          if (from & argument) return fmt::format("overwrites its argument ({})", n->kind().toQualString());
          if (from & container)
            return fmt::format("changes a list or dictionary of the model ({})", n->kind().toQualString());
        }
      for (Block* inner : n->blocks())
        if (auto reason = why(inner); !reason.empty()) return reason;
    }
    return "";
  };
  return why(view.graph->block());
}

std::unordered_set<const Scope*> used_calls(const Graph& method, Scopes& scopes) {
  View view = copy_graph(method, scopes, [](const Scope*) { return true; });
  remove_dead_code(view, UnusedNorms::go);
  const auto scope_of = [&](const Node* n) {  // a block's return node is where the block is used
    if (n->kind() == prim::Return) n = n->owningBlock()->owningNode();
    const auto place = view.places.find(n);
    return place == view.places.end() ? nullptr : place->second.scope;
  };
  std::unordered_set<const Scope*> used;
  for (const auto& [copy, place] : view.places) {
    if (copy->kind() == prim::GetAttr || copy->kind() == prim::Constant) continue;
    for (const Value* v : copy->outputs())
      for (const Use& use : v->uses()) {
        std::unordered_set<const Scope*> around;
        for (const Scope* s = scope_of(use.user); s; s = s->parent) around.insert(s);
        for (const Scope* s = place.scope; s && !around.count(s); s = s->parent)
          if (s->of_module) used.insert(s);
      }
  }
  return used;
}

// What is put into lists, dictionaries and objects after these were made.
static void collect_stored(const Block* block, std::vector<const Value*>& stored) {
  for (const Node* n : block->nodes()) {
    const FunctionSchema* schema = n->maybeSchema();
    const bool stores = n->kind() == prim::SetAttr || (schema && schema->is_mutable() && n->inputs().size() > 1 &&
                                                       !n->input(0)->type()->isSubtypeOf(*TensorType::get()));
    if (stores) stored.insert(stored.end(), n->inputs().begin() + 1, n->inputs().end());
    for (const Block* inner : n->blocks()) collect_stored(inner, stored);
  }
}

// Adds the values that a value may be, be a view of, or hold. (AliasDb has one answer for all that was in one tuple.)
// Returns whether one of those added is in `wanted`.
static bool add_sources(const Value* v, const std::vector<const Value*>& stored,
                        const std::unordered_set<const Value*>& wanted, std::unordered_set<const Value*>& sources) {
  if (!sources.insert(v).second) return false;
  bool found = wanted.count(v) > 0;
  const auto add = [&](const Value* from) { found |= add_sources(from, stored, wanted, sources); };
  const Node* n = v->node();
  const Node* around = n->owningBlock()->owningNode();
  if (n->kind() == prim::Param) {
    if (!around || around->kind() != prim::Loop || v->offset() == 0) return found;
    add(around->inputs()[v->offset() + 1]);
    add(n->owningBlock()->outputs()[v->offset()]);
  } else if (n->kind() == prim::If) {
    for (const Block* branch : n->blocks()) add(branch->outputs()[v->offset()]);
  } else if (n->kind() == prim::Loop) {
    add(n->inputs()[v->offset() + 2]);
    add(n->blocks()[0]->outputs()[v->offset() + 1]);
  } else if (n->kind() == prim::TupleUnpack && n->input()->node()->kind() == prim::TupleConstruct) {
    add(n->input()->node()->input(v->offset()));
  } else if (n->kind() != prim::GetAttr || n->input()->node()->kind() == prim::CreateObject) {
    const FunctionSchema* schema = n->maybeSchema();
    const bool is_call = n->kind() == prim::CallMethod || n->kind() == prim::CallFunction;
    const bool alias =
        schema && v->offset() < schema->returns().size() && schema->returns()[v->offset()].alias_info() != nullptr;
    const bool of_container = !n->inputs().empty() && is_container(n->input(0));
    if (!alias && !is_call && !of_container && !is_container(v) && !passes_on(n)) return found;
    // `out += identity` gives out, and not identity.
    const bool of_all = is_call || is_container(v) || of_container || !alias;
    for (size_t i = 0; i < n->inputs().size(); ++i) {
      const Value* input = n->input(i);
      const bool passed = of_all || (i < schema->arguments().size() && schema->arguments()[i].alias_info());
      if (passed && (is_tensor(input) || is_container(input))) add(input);
    }
    if (of_container)
      for (const Value* s : stored) add(s);
  }
  return found;
}

std::map<const Scope*, std::string> overwritten_arguments(const Graph& method, Scopes& scopes) {
  const View view = copy_graph(method, scopes, [](const Scope*) { return true; });
  std::vector<std::pair<Node*, Value*>> writes;
  std::unordered_map<const Scope*, Node*> last;  // of each call
  std::unordered_map<const Node*, size_t> position;
  const std::function<void(Block*)> visit = [&](Block* b) {
    for (Node* n : b->nodes()) {
      position.emplace(n, position.size());
      if (const auto place = view.places.find(n); place != view.places.end())
        for (const Scope* s = place->second.scope; s; s = s->parent) last[s] = n;
      const FunctionSchema* schema = n->maybeSchema();
      for (size_t k = 0; schema && schema->is_mutable() && k < schema->arguments().size() && k < n->inputs().size();
           ++k)
        if (const auto* alias = schema->arguments()[k].alias_info();
            alias && alias->isWrite() && is_tensor(n->input(k)) && n->input(k)->node()->kind() != prim::GetAttr)
          writes.emplace_back(n, n->input(k));
      for (Block* inner : n->blocks()) visit(inner);
    }
  };
  visit(view.graph->block());
  std::map<const Scope*, std::string> found;
  if (writes.empty()) return found;
  std::vector<const Value*> stored;
  collect_stored(view.graph->block(), stored);
  for (const auto& [s, arguments] : view.arguments) {
    const auto end = last.find(s);
    if (!s->of_module || end == last.end()) continue;
    std::unordered_set<const Value*> passed, of_written;
    for (const Value* argument : arguments) add_sources(argument, stored, {}, passed);
    // In a loop what stands before may run later too.
    const Node* loop = end->second;
    while (loop && loop->kind() != prim::Loop) loop = loop->owningBlock()->owningNode();
    for (const auto& [n, written] : writes) {
      bool in_loop = false;
      for (const Node* around = n; loop && around; around = around->owningBlock()->owningNode())
        in_loop |= around == loop;
      if (position.at(n) <= position.at(end->second) && !in_loop) continue;
      if (add_sources(written, stored, passed, of_written)) found.emplace(s, n->kind().toQualString());
    }
  }
  return found;
}

// The ways to what draws random numbers and is not dead in a method alone.
static std::set<Way> used_draws(const Graph& method) {
  Scopes scopes;
  View view = copy_graph(method, scopes, [](const Scope*) { return true; });
  remove_dead_code(view, UnusedNorms::stay);
  std::set<Way> ways;
  for (const auto& [copy, place] : view.places)
    if (draws(copy)) ways.insert(way_of(place));
  return ways;
}

std::map<const Scope*, std::string> unused_draws(const Graph& method, Scopes& scopes) {
  View view = copy_graph(method, scopes, [](const Scope*) { return true; });
  std::vector<Place> drawing;
  for (const auto& [copy, place] : view.places)
    if (draws(copy)) drawing.push_back(place);
  std::map<const Scope*, std::string> found;
  if (drawing.empty()) return found;
  remove_dead_code(view, UnusedNorms::stay);
  std::map<const Graph*, std::set<Way>> used_in;
  for (const Place& place : drawing) {
    if (view.copies.count({place.scope, place.node})) continue;
    Way way = {place.node};
    for (const Scope* s = place.scope; s; s = s->parent) {
      if (s->branch >= 0) continue;
      if (const auto body = s->of_module ? callee(s->node) : nullptr) {
        const auto used = used_in.find(body.get());
        const std::set<Way>& ways = used == used_in.end() ? used_in[body.get()] = used_draws(*body) : used->second;
        if (ways.count(way)) found.emplace(s, place.node->kind().toQualString());
      }
      way.push_back(s->node);
    }
  }
  return found;
}

std::vector<std::pair<std::string, std::string>> checkpoint_calls(
    Block* block, const std::string& outer, const std::function<bool(const Node*)>& checkpointed) {
  std::vector<std::pair<std::string, std::string>> places;
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    Node* n = *it++;
    for (Block* inner : n->blocks())
      for (auto& place : checkpoint_calls(inner, outer, checkpointed)) places.push_back(place);
    if (n->kind() != prim::CallMethod) continue;
    const auto path = attribute_path(n->input(0));
    if (!path || path->empty() || !checkpointed(n)) continue;
    if (auto body = callee(n))
      if (const std::string why = runs_once(*body); !why.empty())
        throw Error(ErrorKind::request,
                    fmt::format("Checkpoint can't wrap {}: its method {} {}, so it can't be run again",
                                join_path(outer, *path), n->s(attr::name), why));
    WithInsertPoint here(n);
    Value* cast = insert_method_call(*n->owningGraph(), "tsmem::checkpoint", n->input(0), n->s(attr::name),
                                     n->inputs().slice(1), {}, n->output()->type());
    cast->node()->input()->node()->setSourceRange(n->sourceRange());
    if (n->output()->hasDebugName()) cast->setDebugName(n->output()->debugNameBase());
    n->output()->replaceAllUsesWith(cast);
    places.emplace_back(*path, n->s(attr::name));
    n->destroy();
  }
  return places;
}

}  // namespace tsmem
