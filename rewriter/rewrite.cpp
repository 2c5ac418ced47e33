#include "rewriter/rewrite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <unordered_set>

#include "rewriter/added_names.h"
#include "rewriter/apply.h"
#include "rewriter/autodiff.h"
#include "rewriter/checkpoint.h"
#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

static bool starts_with(const std::string& s, const std::string& prefix) { return s.rfind(prefix, 0) == 0; }

std::vector<ModuleClass> module_classes(const Module& module) {
  std::vector<ModuleClass> classes;
  std::unordered_map<const c10::ClassType*, size_t> index;
  std::unordered_set<const c10::ivalue::Object*> ancestors;
  // A shared submodule has several paths; all are listed. Modules can't contain themselves, other than by interfaces:
  // hence `ancestors`.
  std::function<void(const Module&, const std::string&)> walk = [&](const Module& m, const std::string& path) {
    if (!ancestors.insert(m._ivalue().get()).second) return;
    auto [it, is_new] = index.emplace(m.type().get(), classes.size());
    if (is_new) classes.push_back({m.type(), {}});
    classes[it->second].paths.push_back(path);
    for (const auto& child : m.named_children()) walk(child.value, join_path(path, child.name));
    ancestors.erase(m._ivalue().get());
  };
  walk(module, "");
  return classes;
}

static GraphFunction* graph_function(Function* f) { return f ? tryToGraphFunction(*f) : nullptr; }

static std::shared_ptr<Graph> function_graph(Function* f) { return graph_function(f)->graph(); }

// Replaces a graph's body, so that the Function, its schema and everybody who holds it stay.
static void replace_body(Graph& graph, Graph& body) {
  while (!graph.outputs().empty()) graph.eraseOutput(graph.outputs().size() - 1);
  for (auto it = graph.nodes().rbegin(); it != graph.nodes().rend(); it = graph.nodes().rbegin()) it->destroy();
  WithInsertPoint at_end(graph.block());
  for (Value* out : insertGraph(graph, body, graph.inputs())) graph.registerOutput(out);
  // insertGraph gives no names; they make the saved code readable.
  std::function<void(Block*, Block*)> name = [&](Block* to, Block* source) {
    auto s = source->nodes().begin();
    for (Node* n : to->nodes()) {
      for (size_t i = 0; i < n->outputs().size(); ++i)
        if ((*s)->output(i)->hasDebugName()) n->output(i)->setDebugName((*s)->output(i)->debugName());
      for (size_t b = 0; b < n->blocks().size(); ++b) name(n->blocks()[b], (*s)->blocks()[b]);
      ++s;
    }
  };
  name(graph.block(), body.block());
}

// A method of the same signature under another name.
static Function* add_method(const c10::ClassTypePtr& type, const std::string& name, const FunctionSchema& s,
                            const std::shared_ptr<Graph>& body) {
  Function* f = type->compilation_unit()->create_function(c10::QualifiedName(*type->name(), name), body);
  f->setSchema(FunctionSchema(name, s.overload_name(), s.arguments(), s.returns(), s.is_vararg(), s.is_varret()));
  type->addMethod(f);
  return f;
}

static void install(const c10::ClassTypePtr& type, const std::string& method, const std::shared_ptr<Graph>& body) {
  GraphFunction* function = graph_function(type->findMethod(method));
  if (!type->findMethod(kOriginal + method))
    add_method(type, kOriginal + method, function->getSchema(), function->graph()->copy());
  replace_body(*function->graph(), *body);
  function->clear_optimized_graphs();
}

// Throws Error(ErrorKind::request) where a method can't be put under autocast.
static void check_autocast(const Module& module, const std::string& method) {
  GraphFunction* function = graph_function(module.type()->findMethod(method));
  if (!function) throw Error(ErrorKind::request, fmt::format("there is no method '{}' to run under autocast", method));
  Scopes scopes;
  const View view = copy_graph(*function->graph(), scopes, [](const Scope*) { return true; });
  for (const auto& [n, place] : view.places)
    if (borders_autocast(n))
      throw Error(ErrorKind::request,
                  fmt::format("{} has an autocast block of its own{}, which TorchScript gets wrong under another "
                              "autocast: leave --amp out, or take the block out of the model",
                              method,
                              place.scope && !place.scope->path.empty() ? fmt::format(" (in {})", place.scope->path)
                                                                        : std::string()));
}

void write_autocast(Module& module, const std::string& method, const std::string& dtype) {
  check_autocast(module, method);
  const c10::ClassTypePtr type = module.type();
  GraphFunction* function = graph_function(type->findMethod(method));
  add_method(type, kAmp + method, function->getSchema(), function->graph()->copy());
  auto body = std::make_shared<Graph>();
  for (Value* in : function->graph()->inputs()) body->addInput()->copyMetadata(in);
  WithInsertPoint here(body->block());
  body->registerOutput(insert_method_call(*body, "tsmem::autocast", body->inputs()[0], kAmp + method,
                                          body->inputs().slice(1), {dtype}, function->graph()->outputs()[0]->type()));
  install(type, method, body);
}

std::string autocast_of(const Module& module, const std::string& method) {
  GraphFunction* function = graph_function(module.type()->findMethod(method));
  if (!function) return "";
  for (Node* n : function->graph()->nodes())
    if (n->kind() == Symbol::fromQualString("tsmem::autocast"))
      if (auto dtype = toIValue(n->input(3))) return dtype->toStringRef();
  return "";
}

Module submodule(Module m, const std::string& path) {
  for (size_t from = 0; from < path.size();) {
    const size_t dot = std::min(path.find('.', from), path.size());
    m = m.attr(path.substr(from, dot - from)).toModule();
    from = dot + 1;
  }
  return m;
}

bool is_rewritten(const Module& module) {
  for (const ModuleClass& c : module_classes(module))
    if (!added_methods(*c.type).empty()) return true;
  return false;
}

bool restore(Module& module) {
  bool any = false;
  for (const ModuleClass& c : module_classes(module)) {
    for (const std::string& name : added_methods(*c.type)) {
      any = true;
      if (starts_with(name, kOriginal)) {
        GraphFunction* live = graph_function(c.type->findMethod(name.substr(kOriginal.size())));
        GraphFunction* kept = graph_function(c.type->findMethod(name));
        if (!live || !kept)
          throw Error(
              ErrorKind::input,
              fmt::format("{} keeps the original of a method that it no longer has ({}); the file can't be restored",
                          c.type->name()->qualifiedName(), name));
        replace_body(*live->graph(), *kept->graph()->copy());
        live->clear_optimized_graphs();
      }
      c.type->unsafeRemoveMethod(name);
      c.type->compilation_unit()->unsafeRemoveMethod(c10::QualifiedName(*c.type->name(), name));
    }
    std::vector<std::string> attributes;
    for (size_t i = c.type->numAttributes(); i-- > 0;)
      if (starts_with(c.type->getAttributeName(i), kPrefix)) attributes.push_back(c.type->getAttributeName(i));
    if (attributes.empty()) continue;
    any = true;
    for (const std::string& name : attributes) {
      std::unordered_set<const c10::ivalue::Object*> done;  // a shared module has several paths
      for (const std::string& path : c.paths)
        if (auto object = submodule(module, path)._ivalue(); done.insert(object.get()).second)
          object->unsafeRemoveAttr(name);
      c.type->unsafeRemoveAttribute(name);
    }
  }
  return any;
}

namespace {

std::vector<const Pattern*> chosen_patterns(const RewriteOptions& o) {
  std::vector<std::string> names;
  for (const Pattern& p : all_patterns()) names.push_back(p.name);
  for (const auto* list : {&o.only, &o.skip})
    for (const std::string& name : *list)
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        const std::string near = nearest(name, names);
        throw Error(ErrorKind::request, fmt::format("there is no pattern '{}'{}; 'tsmem patterns' lists them", name,
                                                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near)));
      }
  std::vector<const Pattern*> chosen;
  for (const Pattern& p : all_patterns()) {
    const bool named = std::find(o.only.begin(), o.only.end(), p.name) != o.only.end();
    const bool skipped = std::find(o.skip.begin(), o.skip.end(), p.name) != o.skip.end();
    if (!skipped && (o.only.empty() ? p.by_default && (o.level != Level::ops || !p.for_regions) : named))
      chosen.push_back(&p);
  }
  return chosen;
}

using Method = std::pair<const c10::ClassType*, std::string>;

// The methods that a body calls, with those called from inside an autocast block apart.
void collect_calls(const Block* block, bool autocast, std::set<Method>& called, std::set<Method>& in_autocast,
                   std::unordered_set<const Graph*>& functions) {
  for (Node* n : const_cast<Block*>(block)->nodes()) {
    if (borders_autocast(n)) autocast = n->kind() == prim::Enter;
    if (n->kind() == prim::CallMethod) {
      if (auto type = n->input(0)->type()->cast<c10::ClassType>()) {
        called.insert({type.get(), n->s(attr::name)});
        if (autocast) in_autocast.insert({type.get(), n->s(attr::name)});
      }
    } else if (n->kind() == prim::CallFunction) {
      if (auto graph = callee(n); graph && (autocast || functions.insert(graph.get()).second))
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
    collect_calls(f->graph()->block(), false, called, in_autocast, functions);
    for (const Method& m : called)
      if (from.insert(m).second) todo.push_back(m);
  }
  return from;
}

std::string place_name(const Place& p) {
  const std::string op = p.node->kind().toQualString();
  return p.scope && !p.scope->path.empty() ? fmt::format("{}: {}", p.scope->path, op) : op;
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
                    fmt::format("no parameter matches {} '{}'; 'tsmem inspect' lists them", option, glob));
    }
  };
  apply(o.freeze, false, "--freeze");
  apply(o.train, true, "--train");
}

at::Tensor attribute(Module m, const std::string& path) {
  for (size_t from = 0;;) {
    const size_t dot = path.find('.', from);
    const std::string name = path.substr(from, dot == std::string::npos ? dot : dot - from);
    if (!m.hasattr(name)) return {};
    if (dot == std::string::npos) {
      c10::IValue v = m.attr(name);
      return v.isTensor() ? v.toTensor() : at::Tensor();
    }
    m = m.attr(name).toModule();
    from = dot + 1;
  }
}

// What was found in one method. Computed for all methods before any is changed, as callers look into their callees.
struct Result {
  MatchResult matched;                                           // in the whole view
  std::set<std::pair<const Scope*, Node*>> copied;               // the places of the whole view
  std::unordered_set<const Scope*> dead;                         // calls and branches with unused tensors in them
  std::unordered_set<const Scope*> used;                         // with --checkpoint: used_calls()
  std::map<const Scope*, std::string> overwritten;               // with --checkpoint: overwritten_arguments()
  std::unordered_set<const Scope*> inlined;                      // around checkpointed modules' calls that are not used
  std::vector<Found> allowed;                                    // of the matches, what is not left out
  std::vector<Found> found;                                      // of these, what is applied in this method
  std::vector<std::pair<std::string, std::string>> refused;      // pattern, reason
  std::shared_ptr<Graph> body;                                   // rewritten; null where nothing was found
  std::vector<std::pair<std::string, std::string>> checkpoints;  // (module, method) of the calls in it that run again
};

struct LeftOut {
  bool is;
  std::string reason;  // empty: the user has said so
};

// What --module leaves out, and what is called inside an autocast block. A class has one body for all its instances:
// all of them or none.
LeftOut leaves_out(const Found& found, const ModuleClass& c, const Function& method, bool in_autocast,
                   const std::function<bool(const std::string&)>& selected) {
  if (in_autocast)
    return {true, fmt::format("{} is called inside an autocast block of the model's own code, whose casts TorchScript "
                              "inserts for its own operators only",
                              method.name())};
  std::vector<std::string> in, out;
  for (const std::string& path : c.paths) {
    bool all = true;
    for (const Place& p : found.nodes) all &= selected(join_path(path, p.scope ? p.scope->path : ""));
    (all ? in : out).push_back(path);
  }
  if (out.empty()) return {false, ""};
  if (in.empty()) return {true, ""};
  return {true, fmt::format("{} shares its class with {}, which --module leaves out: select all of them", in.front(),
                            fmt::join(out, ", "))};
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

}  // namespace

RewriteReport rewrite(Module& module, const RewriteOptions& options, bool dry_run) {
  const std::vector<const Pattern*> patterns = chosen_patterns(options);
  if (dry_run && options.level == Level::plan) throw std::logic_error("a plan needs attributes, so no dry run");
  if (!dry_run)
    restore(module);
  else if (is_rewritten(module))
    throw std::logic_error("a dry run needs a restored module");
  const std::vector<ModuleClass> classes = module_classes(module);

  std::optional<std::set<Method>> wanted;
  if (!options.method.empty()) {
    if (!module.find_method(options.method)) {
      std::vector<std::string> names;
      for (const auto& m : module.get_methods()) names.push_back(m.name());
      throw Error(ErrorKind::request,
                  fmt::format("the model has no method '{}'; it has: {}", options.method, fmt::join(names, ", ")));
    }
    wanted = reachable({{module.type().get(), options.method}});
  }
  for (const std::string& glob : options.module_globs) {
    bool any = false;
    for (const ModuleClass& c : classes)
      for (const std::string& path : c.paths) any |= glob_covers(glob, path);
    if (!any)
      throw Error(ErrorKind::request, fmt::format("no module matches --module '{}'; 'tsmem inspect' lists them", glob));
  }
  const std::set<std::string> checkpointed = checkpointed_paths(classes, options.checkpoint);
  std::set<Method> in_autocast;
  for (const ModuleClass& c : classes)
    for (Function* f : c.type->methods())
      if (GraphFunction* g = graph_function(f)) {
        std::set<Method> called;
        std::unordered_set<const Graph*> functions;
        collect_calls(g->graph()->block(), false, called, in_autocast, functions);
      }
  in_autocast = reachable(in_autocast);

  const auto selected = [&](const std::string& path) {
    if (options.module_globs.empty()) return true;
    for (const std::string& glob : options.module_globs)
      if (glob_covers(glob, path)) return true;
    return false;
  };

  Scopes scopes;
  RewriteReport report;
  std::map<Method, Result> results;
  for (const ModuleClass& c : classes) {
    std::vector<Module> instances;
    for (const std::string& path : c.paths) instances.push_back(submodule(module, path));
    const Attributes attributes = {
        [&](const std::string& a, const std::string& b) {
          for (const Module& m : instances) {
            const at::Tensor x = attribute(m, a), y = attribute(m, b);
            if (!x.defined() || !y.defined() || !x.has_storage() || !y.has_storage() || x.is_alias_of(y)) return true;
          }
          return false;
        },
        [&](const std::string& a) {
          for (const Module& m : instances)
            if (const at::Tensor x = attribute(m, a);
                !x.defined() || !at::isIntegralType(x.scalar_type(), /*includeBool=*/true))
              return false;
          return true;
        }};
    for (Function* f : c.type->methods()) {
      GraphFunction* function = graph_function(f);
      const Method method{c.type.get(), f->name()};
      if (!function || starts_with(f->name(), kPrefix) || (wanted && !wanted->count(method))) continue;
      Result& result = results[method];
      if (!checkpointed.empty()) {
        result.used = used_calls(*function->graph(), scopes);
        result.overwritten = overwritten_arguments(*function->graph(), scopes);
      }
      // Nothing is matched across the border of a module that runs again as a whole.
      View view = copy_graph(*function->graph(), scopes, [&](const Scope* s) {
        if (!s->of_module || !is_checkpointed(checkpointed, c, s->path)) return true;
        if (!result.used.count(s)) add_with_parents(s->parent, result.inlined);
        return !result.used.count(s);
      });
      for (const auto& [place, copy] : view.copies) result.copied.insert(place);
      result.dead = remove_dead_code(view, UnusedNorms::stay);
      result.matched = find_matches(view, patterns, attributes);
      const auto differentiated = differentiated_dropouts(view);
      for (Found& found : result.matched.found)
        for (const Place& p : found.nodes) found.draws |= differentiated.count(view.copies.at({p.scope, p.node})) > 0;
    }
  }
  const MatchesOf matches_of = [&](const c10::ClassType* type, const std::string& name) {
    auto it = results.find({type, name});
    return it == results.end() ? nullptr : &it->second.matched.found;
  };
  for (const ModuleClass& c : classes)
    for (Function* f : c.type->methods()) {
      auto it = results.find({c.type.get(), f->name()});
      if (it == results.end()) continue;
      Result& result = it->second;
      for (const NearMiss& miss : result.matched.refused) {
        const Scope* s = miss.scope;
        while (s && !s->of_module) s = s->parent;
        if (!s)
          result.refused.push_back({miss.pattern->name, miss.reason});  // else that module's own method reports it
      }
      const auto& all = result.matched.found;
      const auto own = choose_matches(all, all, result.copied, result.inlined, scopes, matches_of).matches;
      for (const Found& found : all) {
        const LeftOut left_out = leaves_out(found, c, *f, in_autocast.count(it->first) > 0, selected);
        if (!left_out.is)
          result.allowed.push_back(found);
        else if (!left_out.reason.empty() && std::find(own.begin(), own.end(), &found) != own.end())
          result.refused.push_back({found.pattern->name, left_out.reason});
      }
    }
  for (const ModuleClass& c : classes) {
    size_t attributes = 0;
    const RecomputeArgument recompute = [&](Graph& g, const std::string& op, const Found& found) {
      const bool dear = offers_recompute(op) == Offers::expensive;
      if (found.overwritten) return g.insertConstant(0);
      const int64_t again = options.level != Level::ops && !dear;
      if (options.level != Level::plan) return g.insertConstant(again);
      const std::string name = kRecompute + std::to_string(attributes++);
      std::unordered_set<const c10::ivalue::Object*> done;
      for (const std::string& path : c.paths)
        if (Module m = submodule(module, path); done.insert(m._ivalue().get()).second) {
          m.register_attribute(name, IntType::get(), again ? kEachTime : kKept);
          report.sites.push_back({path, name, op, dear});
        }
      return g.insertGetAttr(g.inputs()[0], name);
    };
    for (Function* f : std::vector<Function*>(c.type->methods())) {
      auto it = results.find({c.type.get(), f->name()});
      if (it == results.end()) continue;
      Result& result = it->second;
      Choice choice;
      std::optional<View> applied;
      for (const bool inline_all : {false, true}) {
        if (inline_all)
          for (const auto& [scope, node] : result.copied) add_with_parents(scope, result.inlined);
        choice =
            choose_matches(result.allowed, result.matched.found, result.copied, result.inlined, scopes, matches_of);
        if (choice.matches.empty() && choice.inlined.empty() && checkpointed.empty()) break;
        applied = apply_matches(*function_graph(f), scopes, choice, result.dead, recompute);
        if (applied) break;
      }
      const bool changed = !choice.matches.empty() || !choice.inlined.empty();
      if (!changed && checkpointed.empty()) continue;
      if (!applied) throw std::logic_error(fmt::format("an inner value of a match is used in {}", f->name()));
      const View& body = *applied;
      for (const Found* found : choice.matches) result.found.push_back(*found);
      if (!checkpointed.empty() && !in_autocast.count(it->first))
        result.checkpoints = checkpoint_calls(body.graph->block(), c.paths.front(), [&](const Node* call) {
          const Place& place = body.places.at(call);
          const auto scope = scopes.all.find({place.scope, place.node, -1});
          if (scope == scopes.all.end() || !result.used.count(scope->second.get()) ||
              !is_checkpointed(checkpointed, c, scope->second->path))
            return false;
          if (const auto written = result.overwritten.find(scope->second.get()); written != result.overwritten.end())
            throw Error(
                ErrorKind::request,
                fmt::format("--checkpoint can't wrap {}: an argument of its method {} is overwritten "
                            "later ({}), so it can't be run again",
                            join_path(c.paths.front(), scope->second->path), call->s(attr::name), written->second));
          return true;
        });
      if (changed || !result.checkpoints.empty()) result.body = body.graph;
    }
  }

  std::vector<std::string> entries;
  for (const auto& m : module.get_methods())
    if (!starts_with(m.name(), kPrefix) && (options.method.empty() || m.name() == options.method))
      entries.push_back(m.name());
  std::unordered_set<const Node*> again;  // nodes whose output is made again
  for (const auto& [method, result] : results)
    for (const Found& found : result.found)
      for (const Line& line : parse_lines(found.rule->rewrite))
        if (offers_recompute(line.op) == Offers::cheap && !found.overwritten)
          for (const Place& p : found.nodes) again.insert(p.node);
  std::set<std::tuple<std::string, std::string, std::string>> refused;
  for (const auto& [path, method] : reported_methods(module, classes, entries, results)) {
    auto it = results.find({submodule(module, path).type().get(), method});
    if (it == results.end()) continue;
    for (const auto& [inner, name] : it->second.checkpoints)
      report.regions.push_back({join_path(path, inner), name, {"its arguments"}, {"all of " + name}, /*whole=*/true});
    Region region{path, method, {}, {}};
    std::set<std::pair<const Scope*, const Node*>> known_kept;
    for (const Found& found : it->second.found) {
      Match m{found.pattern->name, path, method, {}, false, ""};
      for (const Place& p : found.nodes) m.nodes.push_back(place_name(p));
      for (const Line& line : parse_lines(found.rule->rewrite)) {
        m.op += (m.op.empty() ? "" : " + ") + line.op;
        m.recomputed |= options.level != Level::ops && !found.overwritten && offers_recompute(line.op) == Offers::cheap;
      }
      if (m.recomputed) {
        region.recomputed.push_back(m.nodes.back());
        for (const Place& p : found.sources)
          if (!again.count(p.node) && known_kept.insert({p.scope, p.node}).second) region.kept.push_back(place_name(p));
      }
      report.matches.push_back(std::move(m));
    }
    if (!region.recomputed.empty()) report.regions.push_back(std::move(region));
    for (const auto& [pattern, reason] : it->second.refused)
      if (refused.insert({pattern, path, reason}).second) report.refused.push_back({pattern, path, reason});
  }
  const std::string amp_method = options.method.empty() ? "forward" : options.method;
  if (!options.amp.empty()) check_autocast(module, amp_method);
  if (!dry_run) {
    for (const ModuleClass& c : classes)
      for (Function* f : std::vector<Function*>(c.type->methods()))
        if (auto it = results.find({c.type.get(), f->name()}); it != results.end() && it->second.body)
          install(c.type, f->name(), it->second.body);
    if (!options.amp.empty()) write_autocast(module, amp_method, options.amp);
    set_requires_grad(module, options);
  }
  return report;
}

}  // namespace tsmem
