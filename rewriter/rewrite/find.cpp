#include "rewriter/rewrite/find.h"

#include <torch/csrc/jit/api/function_impl.h>

#include <memory>
#include <type_traits>
#include <unordered_map>

#include "rewriter/measure/inputs.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/autodiff.h"
#include "rewriter/rewrite/checkpoint.h"
#include "rewriter/rewrite/containers.h"
#include "rewriter/rewrite/legality.h"
#include "rewriter/rewrite/model_writes.h"
#include "rewriter/rewrite/preoptimized.h"
#include "rewriter/rewrite/read_results.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

namespace {

// f, which is asked for the same paths over and over, in deep models by each pair of them.
template <class F>
auto each_once(F f) {
  using Answer = std::invoke_result_t<F, const std::string&>;
  return [f, known = std::make_shared<std::unordered_map<std::string, Answer>>()](
             const std::string& path) -> const Answer& {
    const auto it = known->find(path);
    return it != known->end() ? it->second : known->emplace(path, f(path)).first->second;
  };
}

// What an instance has at a path: a tensor, or none, as the bias of a layer that has none.
struct Found {
  bool none;
  at::Tensor tensor;
};

// What the instances of a class say of its attributes.
Attributes attributes_of(std::vector<Module> instances, const ModelWrites& writes) {
  const auto found = each_once([instances](const std::string& path) {
    std::vector<Found> all;
    for (const Module& m : instances) {
      const auto value = value_at(m, path);
      all.push_back({value && value->isNone(), attribute(m, path)});
    }
    return all;
  });
  return {[found](const std::string& a, const std::string& b) {
            const std::vector<Found>&all_a = found(a), &all_b = found(b);
            for (size_t i = 0; i < all_a.size(); ++i) {
              if (all_a[i].none || all_b[i].none) continue;
              const at::Tensor &x = all_a[i].tensor, &y = all_b[i].tensor;
              if (!x.defined() || !y.defined() || !x.has_storage() || !y.has_storage() || x.is_alias_of(y)) return true;
            }
            return false;
          },
          [found](const std::string& a) {
            const std::vector<Found>& all = found(a);
            return std::all_of(all.begin(), all.end(), [](const Found& f) {
              return f.tensor.defined() && at::isIntegralType(f.tensor.scalar_type(), /*includeBool=*/true);
            });
          },
          each_once([instances, &writes](const std::string& a) {
            return std::any_of(instances.begin(), instances.end(), [&](const Module& m) {
              const auto tensors = all_tensors(value_at(m, a).value_or(c10::IValue()));
              return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
                return t.has_storage() && writes.storages.count(t.storage().unsafeGetStorageImpl());
              });
            });
          }),
          writes.set};
}

// Where the dropouts are that draw when TorchScript differentiates the original, in which no call runs again as a
// whole.
std::map<std::pair<const Scope*, Node*>, bool> drawing_dropouts(const View& view) {
  std::map<std::pair<const Scope*, Node*>, bool> found;
  const auto differentiated = differentiated_dropouts(view);
  for (const auto& [n, place] : view.places)
    if (n->kind() == aten::dropout) found[{place.scope, place.node}] = differentiated.count(n) > 0;
  return found;
}

// The dropouts that give their argument, which is overwritten then: an activation in place behind one with p = 0. Not
// those that TorchScript differentiates, whose derivative makes a tensor.
std::set<std::pair<const Scope*, Node*>> overwritten_arguments_of_dropouts(
    const View& view, const std::map<std::pair<const Scope*, Node*>, bool>& drawing) {
  std::set<std::pair<const Scope*, Node*>> found;
  for (const auto& [n, place] : view.places) {
    const auto draws = drawing.find({place.scope, place.node});
    if (drops_nothing(n) && gives_overwritten_input(n) && (draws == drawing.end() || !draws->second))
      found.insert({place.scope, place.node});
  }
  return found;
}

// Leaves dropouts alone whose result may be their argument and is overwritten, as others see, but for those that
// TorchScript differentiates: its derivative makes a tensor, and draws.
void leave_overwritten(MatchResult& matched) {
  std::erase_if(matched.found, [&](const FoundMatch& f) {
    if (!f.argument_is_seen || f.draws) return false;
    matched.refused.push_back({f.pattern, f.scope, overwritten_input(f.makes_new)});
    return true;
  });
}

// Tells the matches which uses of what they overwrite are to be uses of their results.
void add_readers(const Readers& readers, MatchResult& matched) {
  std::map<std::pair<const Scope*, Node*>, const std::vector<Reader>*> by_place;
  for (const auto& of_one : readers)
    by_place[{of_one.front().overwriter.scope, of_one.front().overwriter.node}] = &of_one;
  for (FoundMatch& found : matched.found)
    for (const Place& p : found.nodes)
      if (const auto it = by_place.find({p.scope, p.node}); it != by_place.end())
        found.readers.insert(found.readers.end(), it->second->begin(), it->second->end());
}

// Of these, those in modules that run again, which the rewritten module's own code does not show.
std::map<std::pair<const Scope*, Node*>, bool> drawing_inside(
    const std::map<std::pair<const Scope*, Node*>, bool>& drawing, const ModuleClass& c, const Selection& selection,
    const Result& result) {
  std::map<std::pair<const Scope*, Node*>, bool> found;
  for (const auto& [place, draws] : drawing)
    for (const Scope* s = place.first; s; s = s->parent)
      if (s->of_module && result.used.count(s) && is_checkpointed(selection.checkpointed, c, s->path))
        found[place] = draws;
  return found;
}

// The calls and branches that lead from one scope to another in it.
std::vector<std::pair<Node*, int>> way_in(const Scope* from, const Scope* to) {
  std::vector<std::pair<Node*, int>> way;
  for (const Scope* s = to; s != from; s = s->parent) way.emplace_back(s->node, s->branch);
  return way;
}

// A dropout in a module that runs again draws nothing for nothing where the caller's would not.
void draw_as_callers(Results& results) {
  for (const auto& [caller, result] : results)
    for (const auto& [place, draws] : result.draws_again) {
      if (draws) continue;
      for (const Scope* s = place.first; s; s = s->parent) {
        const auto callee = s->of_module ? results.find({s->type.get(), s->method}) : results.end();
        if (callee == results.end()) continue;
        for (FoundMatch& found : callee->second.matched.found)
          for (const Place& p : found.nodes)
            if (p.node == place.second && way_in(nullptr, p.scope) == way_in(s, place.first)) found.draws = false;
      }
    }
}

// Whether the model's own code takes gradients that it differentiates further: torch.autograd.grad(..., create_graph)
// or backward(..., create_graph).
bool differentiates_twice(const Block* block) {
  static const Symbol grad = Symbol::fromQualString("aten::grad"), backward = Symbol::fromQualString("aten::backward");
  return std::any_of(block->nodes().begin(), block->nodes().end(), [](const Node* n) {
    const size_t at = n->kind() == grad ? 4 : n->kind() == backward ? 3 : 0;  // create_graph
    if (at != 0 && n->inputs().size() > at) {
      const auto create_graph = toIValue(n->input(at));
      return !create_graph || !create_graph->isBool() || create_graph->toBool();
    }
    const Graph* called = graph_of(called_function(n));
    return (called && differentiates_twice(called->block())) ||
           std::any_of(n->blocks().begin(), n->blocks().end(), differentiates_twice);
  });
}

bool model_differentiates_twice(const Selection& selection) {
  for (const ModuleClass& c : selection.classes)
    for (Function* f : c.type->methods())
      if (const GraphFunction* function = graph_function(f);
          function && differentiates_twice(function->graph()->block()))
        return true;
  return false;
}

// In a model that differentiates its own gradients.
void refuse_differentiable_once(MatchResult& matched) {
  std::erase_if(matched.found, [&](const FoundMatch& found) {
    if (!found.pattern->differentiable_once) return false;
    matched.refused.push_back({found.pattern, found.scope,
                               "the model differentiates its own gradients (torch.autograd.grad with create_graph), "
                               "and this operator has no second derivatives"});
    return true;
  });
}

// The matches of one method, in a view of all that it calls.
Result match_method(const Graph& graph, const ModuleClass& c, const Selection& selection, const Attributes& attributes,
                    const Contains& contains, Scopes& scopes) {
  Result result;
  if (!selection.checkpointed.empty()) {
    result.used = used_calls(graph, scopes);
    result.overwritten = overwritten_arguments(graph, scopes);
    result.unused_draws = unused_draws(graph, scopes);
  }
  // Nothing is matched across the border of a module that runs again as a whole.
  const auto inlines = [&](const Scope* s) {
    if (!s->of_module || !is_checkpointed(selection.checkpointed, c, s->path)) return true;
    if (result.used.count(s)) return false;
    add_with_parents(s->parent, result.inlined);
    result.not_used.insert(s->path);
    return true;
  };
  View view = copy_graph(graph, scopes, inlines, callee, /*exact=*/false, contains);
  for (const auto& [place, copy] : view.copies) result.copied.insert(place);
  result.entered = view.entered;
  const Readers readers = readers_of_overwritten(view);
  if (!selection.options.runs_eagerly)
    for (Node* n : dead_draws(view, graph)) {
      add_with_parents(view.places.at(n).scope, result.around_unused);
      leave_out(n, view);
    }
  result.dead = remove_dead_code(view, UnusedNorms::stay);
  if (selection.options.runs_eagerly) view.unused.clear();  // all of them run
  for (const Node* n : view.unused)
    if (updates_statistics(n) && !inside_autocast(n)) add_with_parents(view.places.at(n).scope, result.around_unused);
  std::map<std::pair<const Scope*, Node*>, bool> drawing;
  const bool eager = selection.options.runs_eagerly;  // no dropout draws for nothing
  if (!eager && selection.checkpointed.empty()) {
    drawing = drawing_dropouts(view);
    result.passes_on = overwritten_arguments_of_dropouts(view, drawing);
    for (const auto& place : result.passes_on) leave_out(view.copies.at(place), view);
  } else if (!eager) {
    View whole = copy_graph(graph, scopes, [](const Scope*) { return true; });
    remove_dead_code(whole, UnusedNorms::stay);
    drawing = drawing_dropouts(whole);
    result.draws_again = drawing_inside(drawing, c, selection, result);
  }
  read_results(view, readers);
  result.matched = find_matches(view, selection.patterns, attributes);
  add_readers(readers, result.matched);
  // TorchScript has a derivative of its own for the one that is not in place alone.
  const auto in_place = [](const Place& p) { return p.node->kind() == aten::hardsigmoid_; };
  for (FoundMatch& found : result.matched.found)
    if (found.act == "hardsigmoid" && (eager || std::any_of(found.nodes.begin(), found.nodes.end(), in_place)))
      found.act = "hardsigmoid_eager";
  for (FoundMatch& found : result.matched.found)
    for (const Place& p : found.nodes)
      if (const auto it = drawing.find({p.scope, p.node}); it != drawing.end()) found.draws |= it->second;
  leave_overwritten(result.matched);
  return result;
}

// Whether a method between the view's own and a match refuses one of that pattern too: then it says why.
bool refused_further_in(const NearMiss& miss, const Results& results) {
  for (const Scope* s = miss.scope; s; s = s->parent) {
    const auto own = s->of_module ? results.find({s->type.get(), s->method}) : results.end();
    if (own == results.end()) continue;
    const auto& refused = own->second.matched.refused;
    if (std::any_of(refused.begin(), refused.end(), [&](const NearMiss& m) { return m.pattern == miss.pattern; }))
      return true;
  }
  return false;
}

}  // namespace

Results match_methods(const Module& module, const Selection& selection, Scopes& scopes) {
  Results results;
  const ModelWrites writes = model_writes(module);
  const auto changed = changed_containers(module);
  const bool twice = model_differentiates_twice(selection);
  for (const ModuleClass& c : selection.classes) {
    std::vector<Module> instances;
    for (const std::string& path : c.paths) instances.push_back(submodule(module, path));
    const Contains contains = contains_in(instances, changed);
    const Attributes attributes = attributes_of(std::move(instances), writes);
    for (Function* f : c.type->methods()) {
      GraphFunction* function = graph_function(f);
      const Method method{c.type.get(), f->name()};
      if (!function || is_added_name(f->name()) || (selection.wanted && !selection.wanted->count(method))) continue;
      Result& result =
          results.emplace(method, match_method(*function->graph(), c, selection, attributes, contains, scopes))
              .first->second;
      if (twice) refuse_differentiable_once(result.matched);
    }
  }
  draw_as_callers(results);
  return results;
}

void assign_matches(const Selection& selection, const Scopes& scopes, Results& results) {
  for_each_result(selection, results, [&](const ModuleClass& c, const Function& f, Result& result) {
    for (const NearMiss& miss : result.matched.refused) {
      const Scope* s = miss.scope;
      while (s && !s->of_module) s = s->parent;
      if (!refused_further_in(miss, results))
        result.refused.push_back({miss.pattern->name, s ? s->path : "", miss.reason});
    }
    const auto& all = result.matched.found;
    const auto own =
        choose_matches(all, all, result.copied, result.inlined, scopes, matches_of(results), matches_of(results))
            .matches;
    for (const FoundMatch& found : all) {
      const LeftOut left_out = leaves_out(found, c, {c.type.get(), f.name()}, selection);
      if (!left_out.is)
        result.allowed.push_back(found);
      else if (!left_out.reason.empty() && std::find(own.begin(), own.end(), &found) != own.end())
        result.refused.push_back({found.pattern->name, "", left_out.reason, left_out.shared_class});
    }
  });
}

}  // namespace tsmem
