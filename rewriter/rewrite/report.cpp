#include "rewriter/rewrite/report.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/method_call.h"
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/added_names.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

namespace {

std::string place_name(const Place& p) {
  const std::string op = p.node->kind().toQualString();
  const std::string path = module_path_of(p);
  return path.empty() ? op : fmt::format("{}: {}", path, op);
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

// The nodes whose output backward recomputes.
std::unordered_set<const Node*> recomputed_nodes(const Results& results) {
  std::unordered_set<const Node*> nodes;
  for (const auto& [method, result] : results)
    for (const FoundMatch& found : result.found)
      for (const Line& line : rewrite_lines(found.rule->rewrite))
        if (offers_recompute(line.op) == Offers::cheap && found.overwritten_by.empty())
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

Match match_of(const FoundMatch& found, const std::string& path, const std::string& method, Level level) {
  std::string inner = module_path(found.nodes.front().node);  // of a flat body
  for (const Place& p : found.nodes) inner = common_path(inner, module_path(p.node));
  Match m{found.pattern->name, join_path(path, inner), method, {}, false, "", found.overwritten_by};
  for (const Place& p : found.nodes) m.nodes.push_back(place_name(p));
  for (const Line& line : rewrite_lines(found.rule->rewrite)) {
    m.op += (m.op.empty() ? "" : " + ") + line.op;
    m.recomputed |= level != Level::ops && found.overwritten_by.empty() && offers_recompute(line.op) == Offers::cheap;
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

}  // namespace

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
    for (const FoundMatch& found : it->second.found) {
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

}  // namespace tsmem
