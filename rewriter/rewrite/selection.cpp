#include "rewriter/rewrite/selection.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/function_impl.h>

#include <unordered_set>

#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/checkpoint.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

namespace {

std::vector<const Pattern*> known_patterns(const RewriteOptions& o) {
  std::vector<const Pattern*> known;
  for (const auto* list : {&o.patterns, &all_patterns()})
    for (const Pattern& p : *list) known.push_back(&p);
  return known;
}

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

}  // namespace

std::vector<const Pattern*> chosen_patterns(const RewriteOptions& o) {
  const auto known = known_patterns(o);
  std::vector<std::string> names;
  for (const Pattern* p : known) names.push_back(p->name);
  for (const auto* list : {&o.only, &o.skip})
    for (const std::string& name : *list)
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        const std::string near = nearest(name, names);
        throw Error(ErrorKind::request,
                    fmt::format("There is no pattern '{}'{}", name,
                                near.empty() ? "" : fmt::format(", did you mean '{}'?", near)),
                    "patterns");
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

Selection select(const Module& module, const RewriteOptions& options) {
  Selection s{options, chosen_patterns(options), module_classes(module), {}, {}, {}};
  if (!options.method.empty()) {
    if (!module.find_method(options.method)) {
      std::vector<std::string> names;
      for (const auto& m : module.get_methods()) names.push_back(m.name());
      throw Error(ErrorKind::request,
                  fmt::format("The model has no method '{}'; it has: {}", options.method, fmt::join(names, ", ")));
    }
    s.wanted = reachable({{module.type().get(), options.method}});
  }
  for (const std::string& glob : options.module_globs) {
    bool any = false;
    for (const ModuleClass& c : s.classes)
      for (const std::string& path : c.paths) any |= glob_covers(glob, path);
    if (!any) throw Error(ErrorKind::request, fmt::format("No module matches '{}'", glob), "modules");
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

LeftOut leaves_out(const FoundMatch& found, const ModuleClass& c, const Method& method, const Selection& selection) {
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

}  // namespace tsmem
