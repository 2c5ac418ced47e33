#include "rewriter/rewrite/rewrite.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>

#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/build.h"
#include "rewriter/rewrite/find.h"
#include "rewriter/rewrite/regrouped.h"
#include "rewriter/rewrite/report.h"
#include "rewriter/stays/stays.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

namespace {

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
        throw Error(ErrorKind::request, fmt::format("No parameter matches '{}', which {} names", glob, option),
                    "modules");
    }
  };
  apply(o.freeze, false, "freeze");
  apply(o.train, true, "train");
}

// What the method that was asked for, or forward, keeps for backward, before and after. Nothing where there is no such
// method.
Saved saved_by_graph(const Module& module, const Selection& selection, const Results& results,
                     const RewriteReport& report) {
  const std::string name = selection.options.method.empty() ? "forward" : selection.options.method;
  const GraphFunction* function = graph_function(module.type()->findMethod(name));
  if (!function) return {};
  const Graph& original = *function->graph();
  const auto it = results.find({module.type().get(), name});
  const Graph& rewritten = it != results.end() && it->second.body ? *it->second.body : original;
  const auto tensors = saved_tensors(module, rewritten, rewritten_bodies(results));
  Saved saved;
  saved.stays = stays_of(tensors, selection.options, report);
  saved.tensors = static_cast<int64_t>(tensors.size());
  saved.original_tensors = static_cast<int64_t>(saved_tensors(module, original, callee).size());
  return saved;
}

// Puts the bodies into the module.
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
  Results results = match_methods(module, selection, scopes);
  assign_matches(selection, scopes, results);
  Results found = results;
  std::vector<Site> sites = build_bodies(module, selection, scopes, results);
  if (!options.runs_eagerly && refuse_regrouped(results, found)) {
    if (!dry_run) restore(module);  // the attributes of a plan
    results = std::move(found);
    sites = build_bodies(module, selection, scopes, results);
  }
  RewriteReport done = report(module, selection, results);
  done.sites = std::move(sites);
  const std::string amp_method = options.method.empty() ? "forward" : options.method;
  if (!options.amp.empty()) check_autocast(module, amp_method);
  if (!dry_run) set_requires_grad(module, options);
  done.saved = saved_by_graph(module, selection, results, done);
  if (dry_run) return done;
  install_all(selection, results);
  if (!options.amp.empty()) write_autocast(module, amp_method, options.amp);
  return done;
}

}  // namespace tsmem
