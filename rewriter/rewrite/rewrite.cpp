#include "rewriter/rewrite/rewrite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <unordered_set>

#include "ops/recompute_argument.h"
#include "patterns/pattern.h"
#include "rewriter/error.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/method_call.h"
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/apply.h"
#include "rewriter/rewrite/autodiff.h"
#include "rewriter/rewrite/checkpoint.h"
#include "rewriter/rewrite/unused_norms.h"
#include "rewriter/stays/stays.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

namespace {

// The user's own patterns go before the built-in ones.
std::vector<const Pattern*> known_patterns(const RewriteOptions& o) {
  std::vector<const Pattern*> known;
  for (const auto* list : {&o.patterns, &all_patterns()})
    for (const Pattern& p : *list) known.push_back(&p);
  return known;
}

std::vector<const Pattern*> chosen_patterns(const RewriteOptions& o) {
  const auto known = known_patterns(o);
  std::vector<std::string> names;
  for (const Pattern* p : known) names.push_back(p->name);
  for (const auto* list : {&o.only, &o.skip})
    for (const std::string& name : *list)
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        const std::string near = nearest(name, names);
        throw Error(ErrorKind::request, fmt::format("there is no pattern '{}'{}; 'tsmem patterns' lists them", name,
                                                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near)));
      }
  std::vector<const Pattern*> chosen;
  for (const Pattern* p : known) {
    const bool named = std::find(o.only.begin(), o.only.end(), p->name) != o.only.end();
    const bool skipped = std::find(o.skip.begin(), o.skip.end(), p->name) != o.skip.end();
    if (!skipped && (o.only.empty() ? p->by_default && (o.level != Level::ops || !p->for_regions) : named))
      chosen.push_back(p);
  }
  return chosen;
}

using Method = std::pair<const c10::ClassType*, std::string>;

// The methods that a body calls, with those called from inside an autocast block apart.
void collect_calls(const Block* block, int autocast, std::set<Method>& called, std::set<Method>& in_autocast,
                   std::unordered_set<const Graph*>& functions) {
  for (Node* n : const_cast<Block*>(block)->nodes()) {
    if (borders_autocast(n)) autocast += n->kind() == prim::Enter ? 1 : -1;
    if (n->kind() == prim::CallMethod) {
      if (auto type = n->input(0)->type()->cast<c10::ClassType>()) {
        called.insert({type.get(), n->s(attr::name)});
        if (autocast > 0) in_autocast.insert({type.get(), n->s(attr::name)});
      }
    } else if (n->kind() == prim::CallFunction) {
      if (auto graph = callee(n); graph && (autocast > 0 || functions.insert(graph.get()).second))
        collect_calls(graph->block(), autocast, called, in_autocast, functions);
    }
    for (Block* b : n->blocks()) collect_calls(b, autocast, called, in_autocast, functions);
  }
}

// All that `from` reaches by calls.
std::set<Method> reachable(std::set<Method> from) {
  std::vector<Method> todo(from.begin(), from.end());
  while (!todo.empty()) {
    auto [type, name] = todo.back();
    todo.pop_back();
    GraphFunction* f = graph_function(type->findMethod(name));
    if (!f) continue;
    std::set<Method> called, in_autocast;
    std::unordered_set<const Graph*> functions;
    collect_calls(f->graph()->block(), 0, called, in_autocast, functions);
    for (const Method& m : called)
      if (from.insert(m).second) todo.push_back(m);
  }
  return from;
}

std::string place_name(const Place& p) {
  const std::string op = p.node->kind().toQualString();
  const std::string path = module_path_of(p);
  return path.empty() ? op : fmt::format("{}: {}", path, op);
}

void set_requires_grad(Module& module, const RewriteOptions& o) {
  const auto apply = [&](const std::vector<std::string>& globs, bool on, const char* option) {
    for (const std::string& glob : globs) {
      size_t count = 0;
      for (const auto& p : module.named_parameters()) {
        if (!glob_covers(glob, p.name)) continue;
        ++count;
        if (p.value.is_floating_point() || p.value.is_complex()) p.value.set_requires_grad(on);
      }
      if (count == 0)
        throw Error(ErrorKind::request,
                    fmt::format("no parameter matches '{}', which {} names; 'tsmem inspect' lists them", glob, option));
    }
  };
  apply(o.freeze, false, "freeze");
  apply(o.train, true, "train");
}

// What was found in one method. Computed for all methods before any is changed, as callers look into their callees.
struct Result {
  MatchResult matched;                                           // in the whole view
  std::set<std::pair<const Scope*, Node*>> copied;               // the places of the whole view
  std::unordered_set<const Scope*> dead;                         // calls and branches with unused tensors in them
  std::unordered_set<const Scope*> around_unused;                // of norms that nothing uses, outside autocast blocks
  std::unordered_set<const Scope*> used;                         // where modules run again: used_calls()
  std::map<const Scope*, std::string> overwritten;               // where modules run again: overwritten_arguments()
  std::map<std::pair<const Scope*, Node*>, bool> draws_again;    // where modules run again: drawing_inside()
  std::set<std::string> not_used;                                // checkpointed modules whose calls are not used
  std::unordered_set<const Scope*> inlined;                      // around these calls
  std::vector<Found> allowed;                                    // of the matches, what is not left out
  std::vector<Found> found;                                      // of these, what is applied in this method
  std::vector<Refusal> refused;                                  // without the module
  std::shared_ptr<Graph> body;                                   // rewritten; null where nothing was found
  std::optional<View> body_view;                                 // of the same graph
  std::vector<std::pair<std::string, std::string>> checkpoints;  // (module, method) of the calls in it that run again
};

struct LeftOut {
  bool is;
  std::string reason;  // empty: the user has said so
  bool shared_class = false;
};

// What was asked for, looked up in the module.
struct Selection {
  const RewriteOptions& options;
  std::vector<const Pattern*> patterns;
  std::vector<ModuleClass> classes;
  std::optional<std::set<Method>> wanted;  // by `method`; none: all
  std::set<std::string> checkpointed;      // paths of modules that run again as a whole
  std::set<Method> in_autocast;            // called inside an autocast block of the model's own code

  bool holds(const std::string& path) const {
    const auto& globs = options.module_globs;
    return globs.empty() || std::any_of(globs.begin(), globs.end(), [&](auto& g) { return glob_covers(g, path); });
  }
};

// What the option `module` leaves out, and what is called inside an autocast block. A class has one body for all its
// instances: all of them or none.
LeftOut leaves_out(const Found& found, const ModuleClass& c, const Method& method, const Selection& selection) {
  if (selection.in_autocast.count(method))
    return {true, fmt::format("{} is called inside an autocast block of the model's own code, whose casts TorchScript "
                              "inserts for its own operators only",
                              method.second)};
  std::vector<std::string> in, out;
  for (const std::string& path : c.paths) {
    bool all = true;
    for (const Place& p : found.nodes) all &= selection.holds(join_path(path, module_path_of(p)));
    (all ? in : out).push_back(path);
  }
  if (out.empty()) return {false, ""};
  if (in.empty()) return {true, ""};
  return {true,
          fmt::format("{} shares its class with {}, which is not selected: select all of them", in.front(),
                      fmt::join(out, ", ")),
          true};
}

using Calls = std::set<std::pair<std::string, std::string>>;  // module path, method

// Adds all that runs when a method is called. With `results`: by the rewritten bodies; null: by the original ones.
void add_calls(const Module& root, const std::string& path, const std::string& method,
               const std::map<Method, Result>* results, Calls& seen) {
  if (!seen.insert({path, method}).second) return;
  const Module m = submodule(root, path);
  const Result* result = nullptr;
  if (results)
    if (auto it = results->find({m.type().get(), method}); it != results->end()) result = &it->second;
  GraphFunction* f = graph_function(m.type()->findMethod(method));
  const std::shared_ptr<Graph> body = result && result->body ? result->body : f ? f->graph() : nullptr;
  const std::function<void(Block*)> walk = [&](Block* b) {
    for (Node* n : b->nodes()) {
      if (n->kind() == prim::CallMethod)
        if (auto inner = attribute_path(n->input(0)))
          add_calls(root, join_path(path, *inner), n->s(attr::name), results, seen);
      for (Block* inner : n->blocks()) walk(inner);
    }
  };
  if (body) walk(body->block());
  if (result)
    for (const auto& [inner, name] : result->checkpoints) add_calls(root, join_path(path, inner), name, results, seen);
}

// Every method that is reported: all that runs when `methods` of the root are called, with the rewritten bodies. A
// method whose calls were all inlined elsewhere stays callable, and is not reported. Where nothing is rewritten in
// these (a container of encoder and decoder, which the user's code calls), all that nothing else in the model calls.
Calls reported_methods(const Module& root, const std::vector<ModuleClass>& classes,
                       const std::vector<std::string>& methods, const std::map<Method, Result>& results) {
  Calls running, originally;
  const auto add = [&](const std::string& path, const std::string& method) {
    add_calls(root, path, method, nullptr, originally);
    add_calls(root, path, method, &results, running);
  };
  for (const std::string& method : methods) add("", method);
  const bool rewritten = std::any_of(running.begin(), running.end(), [&](const auto& call) {
    const auto it = results.find({submodule(root, call.first).type().get(), call.second});
    return it != results.end() && it->second.body;
  });
  if (rewritten) return running;
  for (const ModuleClass& c : classes)  // parents come first
    for (const std::string& path : c.paths)
      for (const Function* f : c.type->methods())
        if (results.count({c.type.get(), f->name()}) && !originally.count({path, f->name()})) add(path, f->name());
  return running;
}

using Results = std::map<Method, Result>;

// Phase 1: looks up what was asked for. Throws Error for what there is not.
Selection select(const Module& module, const RewriteOptions& options) {
  Selection s{options, chosen_patterns(options), module_classes(module), {}, {}, {}};
  if (!options.method.empty()) {
    if (!module.find_method(options.method)) {
      std::vector<std::string> names;
      for (const auto& m : module.get_methods()) names.push_back(m.name());
      throw Error(ErrorKind::request,
                  fmt::format("the model has no method '{}'; it has: {}", options.method, fmt::join(names, ", ")));
    }
    s.wanted = reachable({{module.type().get(), options.method}});
  }
  for (const std::string& glob : options.module_globs) {
    bool any = false;
    for (const ModuleClass& c : s.classes)
      for (const std::string& path : c.paths) any |= glob_covers(glob, path);
    if (!any) throw Error(ErrorKind::request, fmt::format("no module matches '{}'; 'tsmem inspect' lists them", glob));
  }
  s.checkpointed = checkpointed_paths(s.classes, options.checkpoint);
  for (const ModuleClass& c : s.classes)
    for (Function* f : c.type->methods())
      if (GraphFunction* g = graph_function(f)) {
        std::set<Method> called;
        std::unordered_set<const Graph*> functions;
        collect_calls(g->graph()->block(), 0, called, s.in_autocast, functions);
      }
  s.in_autocast = reachable(s.in_autocast);
  return s;
}

// What the instances of a class say of its attributes.
Attributes attributes_of(std::vector<Module> instances) {
  return {[instances](const std::string& a, const std::string& b) {
            for (const Module& m : instances) {
              const at::Tensor x = attribute(m, a), y = attribute(m, b);
              if (!x.defined() || !y.defined() || !x.has_storage() || !y.has_storage() || x.is_alias_of(y)) return true;
            }
            return false;
          },
          [instances](const std::string& a) {
            for (const Module& m : instances)
              if (const at::Tensor x = attribute(m, a);
                  !x.defined() || !at::isIntegralType(x.scalar_type(), /*includeBool=*/true))
                return false;
            return true;
          }};
}

// The dropouts in modules that run again, and whether they draw when TorchScript differentiates all of the method,
// which the rewritten module's own code does not show.
std::map<std::pair<const Scope*, Node*>, bool> drawing_inside(const Graph& graph, const ModuleClass& c,
                                                              const Selection& selection, const Result& result,
                                                              Scopes& scopes) {
  View whole = copy_graph(graph, scopes, [](const Scope*) { return true; });
  remove_dead_code(whole, UnusedNorms::stay);
  const auto differentiated = differentiated_dropouts(whole);
  std::map<std::pair<const Scope*, Node*>, bool> found;
  for (const auto& [n, place] : whole.places) {
    if (n->kind() != aten::dropout) continue;
    for (const Scope* s = place.scope; s; s = s->parent)
      if (s->of_module && result.used.count(s) && is_checkpointed(selection.checkpointed, c, s->path))
        found[{place.scope, place.node}] = differentiated.count(n) > 0;
  }
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
        for (Found& found : callee->second.matched.found)
          for (const Place& p : found.nodes)
            if (p.node == place.second && way_in(nullptr, p.scope) == way_in(s, place.first)) found.draws = false;
      }
    }
}

// The matches of one method, in a view of all that it calls.
Result match_method(const Graph& graph, const ModuleClass& c, const Selection& selection, const Attributes& attributes,
                    Scopes& scopes) {
  Result result;
  if (!selection.checkpointed.empty()) {
    result.used = used_calls(graph, scopes);
    result.overwritten = overwritten_arguments(graph, scopes);
  }
  // Nothing is matched across the border of a module that runs again as a whole.
  View view = copy_graph(graph, scopes, [&](const Scope* s) {
    if (!s->of_module || !is_checkpointed(selection.checkpointed, c, s->path)) return true;
    if (result.used.count(s)) return false;
    add_with_parents(s->parent, result.inlined);
    result.not_used.insert(s->path);
    return true;
  });
  for (const auto& [place, copy] : view.copies) result.copied.insert(place);
  result.dead = remove_dead_code(view, UnusedNorms::stay);
  for (const Node* n : view.unused)
    if (updates_statistics(n) && !inside_autocast(n)) add_with_parents(view.places.at(n).scope, result.around_unused);
  result.matched = find_matches(view, selection.patterns, attributes);
  if (selection.options.runs_eagerly) return result;
  if (!selection.checkpointed.empty()) result.draws_again = drawing_inside(graph, c, selection, result, scopes);
  const auto differentiated = differentiated_dropouts(view);
  for (Found& found : result.matched.found)
    for (const Place& p : found.nodes) found.draws |= differentiated.count(view.copies.at({p.scope, p.node})) > 0;
  return result;
}

// Phase 2: finds the matches of every method that was asked for.
Results match(const Module& module, const Selection& selection, Scopes& scopes) {
  Results results;
  for (const ModuleClass& c : selection.classes) {
    std::vector<Module> instances;
    for (const std::string& path : c.paths) instances.push_back(submodule(module, path));
    const Attributes attributes = attributes_of(std::move(instances));
    for (Function* f : c.type->methods()) {
      GraphFunction* function = graph_function(f);
      const Method method{c.type.get(), f->name()};
      if (!function || is_added_name(f->name()) || (selection.wanted && !selection.wanted->count(method))) continue;
      results.emplace(method, match_method(*function->graph(), c, selection, attributes, scopes));
    }
  }
  draw_as_callers(results);
  return results;
}

// Calls f(class, function, result) for every method that has a result, parents first.
template <class F>
void for_each_result(const Selection& selection, Results& results, F f) {
  for (const ModuleClass& c : selection.classes)
    for (Function* function : std::vector<Function*>(c.type->methods()))
      if (auto it = results.find({c.type.get(), function->name()}); it != results.end()) f(c, *function, it->second);
}

MatchesOf matches_of(const Results& results) {
  return [&results](const c10::ClassType* type, const std::string& name) {
    auto it = results.find({type, name});
    return it == results.end() ? nullptr : &it->second.matched.found;
  };
}

// Of these, what is not left out: what is never applied there is no reason to inline a call.
MatchesOf allowed_matches_of(const Results& results) {
  return [&results](const c10::ClassType* type, const std::string& name) {
    auto it = results.find({type, name});
    return it == results.end() ? nullptr : &it->second.allowed;
  };
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

// Phase 3: of the matches, those that are allowed, and why others are not.
void assign(const Selection& selection, const Scopes& scopes, Results& results) {
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
    for (const Found& found : all) {
      const LeftOut left_out = leaves_out(found, c, {c.type.get(), f.name()}, selection);
      if (!left_out.is)
        result.allowed.push_back(found);
      else if (!left_out.reason.empty() && std::find(own.begin(), own.end(), &found) != own.end())
        result.refused.push_back({found.pattern->name, "", left_out.reason, left_out.shared_class});
    }
  });
}

// Makes the values of the ops' argument `recompute` for one class. At Level::plan each op has an attribute of its own,
// which is given to all instances and noted in `sites`.
RecomputeValue recompute_argument(const Module& module, const ModuleClass& c, Level level, size_t& attributes,
                                  std::vector<Site>& sites) {
  return [&module, &c, level, &attributes, &sites](Graph& g, const std::string& op, const Found& found) {
    const bool expensive = offers_recompute(op) == Offers::expensive;
    const bool again = level != Level::ops && !expensive;
    if (found.overwritten) return g.insertConstant(argument_of(Recompute::off));
    if (level != Level::plan) return g.insertConstant(argument_of(again ? Recompute::shared : Recompute::off));
    const std::string name = kRecompute + std::to_string(attributes++);
    std::unordered_set<const c10::ivalue::Object*> done;
    for (const std::string& path : c.paths)
      if (Module m = submodule(module, path); done.insert(m._ivalue().get()).second) {
        m.register_attribute(name, IntType::get(), argument_of(again ? Recompute::each_time : Recompute::keep));
        sites.push_back({path, name, op, expensive});
      }
    return g.insertGetAttr(g.inputs()[0], name);
  };
}

// A method's body with its matches applied, and which those are. Where code that is never run can't be told apart,
// everything is inlined.
struct Applied {
  Choice choice;
  std::optional<View> body;
};

Applied apply_in(const Function& f, Result& result, const Selection& selection, Scopes& scopes, const Results& results,
                 const RecomputeValue& recompute) {
  Applied a;
  for (const bool inline_all : {false, true}) {
    if (inline_all)
      for (const auto& [scope, node] : result.copied) add_with_parents(scope, result.inlined);
    a.choice = choose_matches(result.allowed, result.matched.found, result.copied, result.inlined, scopes,
                              matches_of(results), allowed_matches_of(results));
    if (a.choice.matches.empty() && a.choice.inlined.empty() && selection.checkpointed.empty()) return a;
    // What keeps such a norm stands right behind it (keep_unused_norms).
    if (!result.around_unused.empty()) {
      result.inlined.merge(std::unordered_set(result.around_unused));
      a.choice = choose_matches(result.allowed, result.matched.found, result.copied, result.inlined, scopes,
                                matches_of(results), allowed_matches_of(results));
    }
    const Graph& source = *function_graph(const_cast<Function*>(&f));
    if ((a.body = apply_matches(source, scopes, a.choice, result.dead, recompute))) return a;
  }
  throw std::logic_error(fmt::format("an inner value of a match is used in {}", f.name()));
}

// Makes the calls of checkpointed modules in a rewritten body run again as a whole.
void checkpoint_in(const View& body, const ModuleClass& c, const Selection& selection, const Scopes& scopes,
                   Result& result) {
  result.checkpoints = checkpoint_calls(body.graph->block(), c.paths.front(), [&](const Node* call) {
    // TorchScript's casts end at an operator that calls a method.
    if (const auto type = call->input(0)->type()->cast<c10::ClassType>();
        type && selection.in_autocast.count({type.get(), call->s(attr::name)}))
      return false;
    const Place& place = body.places.at(call);
    const auto scope = scopes.all.find({place.scope, place.node, -1});
    if (scope == scopes.all.end() || !result.used.count(scope->second.get()) ||
        !is_checkpointed(selection.checkpointed, c, scope->second->path))
      return false;
    if (const auto written = result.overwritten.find(scope->second.get()); written != result.overwritten.end())
      throw Error(ErrorKind::request,
                  fmt::format("checkpoint can't wrap {}: an argument of its method {} is overwritten "
                              "later ({}), so it can't be run again",
                              join_path(c.paths.front(), scope->second->path), call->s(attr::name), written->second));
    return true;
  });
}

// The bodies that calls run once the rewritten ones are there.
BodyOf rewritten_bodies(const Results& results) {
  return [&results](const Node* call) {
    if (call->kind() == prim::CallMethod)
      if (const auto type = call->input(0)->type()->cast<c10::ClassType>())
        if (const auto it = results.find({type.get(), call->s(attr::name)}); it != results.end() && it->second.body)
          return it->second.body;
    return callee(call);
  };
}

// Phase 4: makes the rewritten bodies, and at Level::plan the attributes that they read.
std::vector<Site> build(const Module& module, const Selection& selection, Scopes& scopes, Results& results) {
  std::vector<Site> sites;
  for (const ModuleClass& c : selection.classes) {
    size_t attributes = 0;
    const auto recompute = recompute_argument(module, c, selection.options.level, attributes, sites);
    for (Function* f : std::vector<Function*>(c.type->methods())) {
      const Method method{c.type.get(), f->name()};
      const auto it = results.find(method);
      if (it == results.end()) continue;
      Result& result = it->second;
      Applied applied = apply_in(*f, result, selection, scopes, results, recompute);
      if (!applied.body) continue;
      for (const Found* found : applied.choice.matches) result.found.push_back(*found);
      if (!selection.checkpointed.empty() && !selection.in_autocast.count(method))
        checkpoint_in(*applied.body, c, selection, scopes, result);
      if (applied.choice.matches.empty() && applied.choice.inlined.empty() && result.checkpoints.empty()) continue;
      result.body = applied.body->graph;
      result.body_view = std::move(applied.body);
    }
  }
  // What runs of a body depends on all that it calls.
  const BodyOf body_of = rewritten_bodies(results);
  for_each_result(selection, results, [&](const ModuleClass&, const Function& f, Result& result) {
    if (!result.body) return;
    keep_unused_norms(*function_graph(const_cast<Function*>(&f)), *result.body_view, body_of);
    result.body->lint();
  });
  return sites;
}

// The nodes whose output backward recomputes.
std::unordered_set<const Node*> recomputed_nodes(const Results& results) {
  std::unordered_set<const Node*> nodes;
  for (const auto& [method, result] : results)
    for (const Found& found : result.found)
      for (const Line& line : rewrite_lines(found.rule->rewrite))
        if (offers_recompute(line.op) == Offers::cheap && !found.overwritten)
          for (const Place& p : found.nodes) nodes.insert(p.node);
  return nodes;
}

// The innermost module that holds both, by their paths.
std::string common_path(const std::string& a, const std::string& b) {
  size_t end = 0;
  for (size_t i = 0; i <= a.size() && i <= b.size(); ++i) {
    const bool a_ends = i == a.size() || a[i] == '.', b_ends = i == b.size() || b[i] == '.';
    if (a_ends && b_ends) end = i;
    if (i == a.size() || i == b.size() || a[i] != b[i]) break;
  }
  return a.substr(0, end);
}

Match match_of(const Found& found, const std::string& path, const std::string& method, Level level) {
  std::string inner = module_path(found.nodes.front().node);  // of a flat body
  for (const Place& p : found.nodes) inner = common_path(inner, module_path(p.node));
  Match m{found.pattern->name, join_path(path, inner), method, {}, false, ""};
  for (const Place& p : found.nodes) m.nodes.push_back(place_name(p));
  for (const Line& line : rewrite_lines(found.rule->rewrite)) {
    m.op += (m.op.empty() ? "" : " + ") + line.op;
    m.recomputed |= level != Level::ops && !found.overwritten && offers_recompute(line.op) == Offers::cheap;
  }
  return m;
}

// Modules that were to be checkpointed, of which no call or not every call is.
std::vector<Refusal> not_checkpointed(const Selection& selection, const Calls& reported, const Results& results,
                                      const RewriteReport& report, const Module& module) {
  std::set<std::string> wrapped, not_used, in_autocast;
  for (const Region& region : report.regions)
    if (region.whole) wrapped.insert(region.module);
  for (const auto& [path, method] : reported) {
    const Method key{submodule(module, path).type().get(), method};
    if (const auto it = results.find(key); it != results.end())
      for (const std::string& inner : it->second.not_used) not_used.insert(join_path(path, inner));
    if (selection.in_autocast.count(key)) in_autocast.insert(path);
  }
  std::vector<Refusal> refused;
  const auto refuse = [&](const std::string& path, const std::string& reason) {
    refused.push_back({"checkpoint", path, reason});
  };
  const auto calls_inside = [&](const std::string& path) {
    return std::any_of(reported.begin(), reported.end(),
                       [&](const auto& call) { return call.first.rfind(path + ".", 0) == 0; });
  };
  for (const std::string& path : selection.checkpointed)
    if (not_used.count(path))
      refuse(path, wrapped.count(path) ? "one of its calls is not wrapped, as nothing uses its result"
                                       : "it is not wrapped, as nothing uses the result of its call");
    else if (in_autocast.count(path) && !wrapped.count(path))
      refuse(path, "it is not wrapped, as its method is called inside an autocast block of the model's own code");
    else if (!wrapped.count(path))
      refuse(path, calls_inside(path) ? fmt::format("nothing calls it itself; '{}.*' names the modules in it", path)
                                      : "it is not wrapped, as no method that is rewritten calls it");
  return refused;
}

// Phase 5: says what was done, module by module.
RewriteReport report(const Module& module, const Selection& selection, const Results& results) {
  const std::string& only = selection.options.method;
  std::vector<std::string> entries;
  for (const auto& m : module.get_methods())
    if (!is_added_name(m.name()) && (only.empty() || m.name() == only)) entries.push_back(m.name());
  const auto again = recomputed_nodes(results);
  RewriteReport report;
  std::set<std::tuple<std::string, std::string, std::string>> refused;
  const Calls reported = reported_methods(module, selection.classes, entries, results);
  for (const auto& [path, method] : reported) {
    const auto it = results.find({submodule(module, path).type().get(), method});
    if (it == results.end()) continue;
    for (const auto& [inner, name] : it->second.checkpoints)
      report.regions.push_back({join_path(path, inner), name, {"its arguments"}, {"all of " + name}, /*whole=*/true});
    Region region{path, method, {}, {}};
    std::set<std::pair<const Scope*, const Node*>> known_kept;
    for (const Found& found : it->second.found) {
      Match m = match_of(found, path, method, selection.options.level);
      if (m.recomputed) {
        region.recomputed.push_back(m.nodes.back());
        for (const Place& p : found.sources)
          if (!again.count(p.node) && known_kept.insert({p.scope, p.node}).second) region.kept.push_back(place_name(p));
      }
      report.matches.push_back(std::move(m));
    }
    if (!region.recomputed.empty()) report.regions.push_back(std::move(region));
    for (Refusal r : it->second.refused) {
      r.module = join_path(path, r.module);
      if (refused.insert({r.pattern, r.module, r.reason}).second) report.refused.push_back(std::move(r));
    }
  }
  for (Refusal& r : not_checkpointed(selection, reported, results, report, module))
    report.refused.push_back(std::move(r));
  report.bodies = std::count_if(results.begin(), results.end(), [](const auto& r) { return r.second.body != nullptr; });
  return report;
}

// What the method that was asked for, or forward, keeps for backward, before and after. Nothing where there is no such
// method.
Saved saved_by_graph(const Module& module, const Selection& selection, const Results& results,
                     const std::vector<Refusal>& refused) {
  const std::string name = selection.options.method.empty() ? "forward" : selection.options.method;
  const GraphFunction* function = graph_function(module.type()->findMethod(name));
  if (!function) return {};
  const Graph& original = *function->graph();
  const auto it = results.find({module.type().get(), name});
  const Graph& rewritten = it != results.end() && it->second.body ? *it->second.body : original;
  const auto kept = kept_tensors(module, rewritten, rewritten_bodies(results));
  Saved saved;
  saved.stays = stays_of(kept, selection.options, refused);
  saved.tensors = static_cast<int64_t>(kept.size());
  saved.original_tensors = static_cast<int64_t>(kept_tensors(module, original, callee).size());
  return saved;
}

// Phase 6: puts the bodies into the module.
void install_all(const Selection& selection, Results& results) {
  for_each_result(selection, results, [](const ModuleClass& c, const Function& f, const Result& result) {
    if (!result.body) return;
    install(c.type, f.name(), result.body);
    function_graph(c.type->findMethod(f.name()))->lint();
  });
}

}  // namespace

RewriteReport rewrite(Module& module, const RewriteOptions& options, bool dry_run) {
  if (dry_run && options.level == Level::plan) throw std::logic_error("a plan needs attributes, so no dry run");
  check_patterns(options.patterns);  // before anything is changed
  chosen_patterns(options);
  if (!dry_run)
    restore(module);
  else if (is_rewritten(module))
    throw std::logic_error("a dry run needs a restored module");
  const Selection selection = select(module, options);
  Scopes scopes;
  Results results = match(module, selection, scopes);
  assign(selection, scopes, results);
  std::vector<Site> sites = build(module, selection, scopes, results);
  RewriteReport done = report(module, selection, results);
  done.sites = std::move(sites);
  const std::string amp_method = options.method.empty() ? "forward" : options.method;
  if (!options.amp.empty()) check_autocast(module, amp_method);
  if (!dry_run) set_requires_grad(module, options);
  done.saved = saved_by_graph(module, selection, results, done.refused);
  if (dry_run) return done;
  install_all(selection, results);
  if (!options.amp.empty()) write_autocast(module, amp_method, options.amp);
  return done;
}

}  // namespace tsmem
