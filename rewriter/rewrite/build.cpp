#include "rewriter/rewrite/build.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>

#include "ops/recompute_argument.h"
#include "ops/traits.h"
#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/checkpoint.h"
#include "rewriter/rewrite/preoptimized.h"
#include "rewriter/rewrite/unused_norms.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

namespace {

// Of these, what is not left out: what is never applied there is no reason to inline a call.
MatchesOf allowed_matches_of(const Results& results) {
  return [&results](const c10::ClassType* type, const std::string& name) {
    auto it = results.find({type, name});
    return it == results.end() ? nullptr : &it->second.allowed;
  };
}

// Makes the values of the ops' argument `recompute` for one class. At Level::plan each op has an attribute of its own,
// which is given to all instances and noted in `sites`.
RecomputeValue recompute_argument(const Module& module, const ModuleClass& c, Level level, size_t& attributes,
                                  std::vector<Site>& sites) {
  return [&module, &c, level, &attributes, &sites](Graph& g, const std::string& op, const FoundMatch& found) {
    const bool expensive = offers_recompute(op) == Offers::expensive;
    const bool again = level != Level::ops && !expensive;
    if (!found.overwritten_by.empty()) return g.insertConstant(argument_of(Recompute::off));
    const bool if_cheap = level == Level::regions && traits_of(op).may_be_cheap;
    const Recompute how = again ? Recompute::shared : if_cheap ? Recompute::if_cheap : Recompute::off;
    if (level != Level::plan) return g.insertConstant(argument_of(how));
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

// A method's body with its matches applied, and which those are. Where code that is never run can't be told apart, or
// who reads what is overwritten, everything is inlined; at last the matches are left out whose results others read by
// an old name.
struct Applied {
  Choice choice;
  std::optional<View> body;
};

Applied apply_in(const Function& f, Result& result, const Selection& selection, Scopes& scopes, const Results& results,
                 const RecomputeValue& recompute, const std::set<WayInMethod>& lasting) {
  std::unordered_set<const Scope*> around_unused = result.around_unused;
  for (const auto& [scope, node] : result.copied)
    if (updates_statistics(node) && !in_autocast({scope, node}) && lasting.count(way_in_method({scope, node})))
      add_with_parents(scope, around_unused);
  Applied a;
  for (const int attempt : {0, 1, 2}) {
    if (attempt == 1) result.inlined.insert(result.entered.begin(), result.entered.end());
    if (attempt == 2)
      std::erase_if(result.allowed, [&](const FoundMatch& found) {
        if (found.readers.empty()) return false;
        result.refused.push_back({found.pattern->name, "", "who reads the tensor that it overwrites is not known"});
        return true;
      });
    a.choice = choose_matches(result.allowed, result.matched.found, result.copied, result.inlined, scopes,
                              matches_of(results), allowed_matches_of(results));
    if (a.choice.matches.empty() && a.choice.inlined.empty() && selection.checkpointed.empty()) return a;
    // Our operators stand there for such norms (put_unused_norms).
    if (!around_unused.empty()) {
      result.inlined.insert(around_unused.begin(), around_unused.end());
      a.choice = choose_matches(result.allowed, result.matched.found, result.copied, result.inlined, scopes,
                                matches_of(results), allowed_matches_of(results));
    }
    const Graph& source = *function_graph(const_cast<Function*>(&f));
    if ((a.body = apply_matches(source, scopes, a.choice, result.passes_on, result.dead, recompute))) return a;
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
                  fmt::format("Checkpoint can't wrap {}: an argument of its method {} is overwritten "
                              "later ({}), so it can't be run again",
                              join_path(c.paths.front(), scope->second->path), call->s(attr::name), written->second));
    if (const auto drawing = result.unused_draws.find(scope->second.get()); drawing != result.unused_draws.end())
      throw Error(ErrorKind::request,
                  fmt::format("Checkpoint can't wrap {}: its method {} draws random numbers for a result that nothing "
                              "uses ({}), which the original leaves out, and a method that is run again would not",
                              join_path(c.paths.front(), scope->second->path), call->s(attr::name), drawing->second));
    return true;
  });
}

}  // namespace

std::vector<Site> build_bodies(const Module& module, const Selection& selection, Scopes& scopes, Results& results) {
  std::vector<Site> sites;
  // Programs of torch.export run eagerly.
  const auto lasting = selection.options.runs_eagerly ? std::set<WayInMethod>() : lasting_unused_norms(module);
  bool any = false;
  for (const ModuleClass& c : selection.classes) {
    size_t attributes = 0;
    const auto recompute = recompute_argument(module, c, selection.options.level, attributes, sites);
    for (Function* f : std::vector<Function*>(c.type->methods())) {
      const Method method{c.type.get(), f->name()};
      const auto it = results.find(method);
      if (it == results.end()) continue;
      Result& result = it->second;
      Applied applied = apply_in(*f, result, selection, scopes, results, recompute, lasting);
      if (!applied.body) continue;
      for (const FoundMatch* found : applied.choice.matches) result.found.push_back(*found);
      if (!selection.checkpointed.empty() && !selection.in_autocast.count(method))
        checkpoint_in(*applied.body, c, selection, scopes, result);
      if (applied.choice.matches.empty() && applied.choice.inlined.empty() && result.checkpoints.empty()) continue;
      if (!selection.options.runs_eagerly)
        for (Node* n : dead_draws(*applied.body, *function_graph(f))) leave_out(n, *applied.body);
      result.body = applied.body->graph;
      result.body_view = std::move(applied.body);
      any = true;
    }
  }
  if (!any) return sites;
  // What runs of a body depends on all that it calls.
  const BodyOf body_of = rewritten_bodies(results);
  for_each_result(selection, results, [&](const ModuleClass&, const Function& f, Result& result) {
    const Graph& source = *function_graph(const_cast<Function*>(&f));
    if (result.body)
      put_unused_norms(source, *result.body_view, body_of, lasting);
    else if ((result.body_view = with_unused_norms(source, scopes, result.around_unused, body_of, lasting)))
      result.body = result.body_view->graph;
    if (result.body) result.body->lint();
  });
  return sites;
}

}  // namespace tsmem
