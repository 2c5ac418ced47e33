#include "rewriter/compare/diff.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <functional>
#include <unordered_set>
#include <utility>

#include "rewriter/compare/graph_lines.h"
#include "rewriter/compare/op_counts.h"
#include "rewriter/compare/value_text.h"
#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// The call under autocast that is all of a method written by write_autocast(), else null.
const Node* autocast_call(const Graph* graph) {
  if (graph)
    for (const Node* n : graph->nodes())
      if (n->kind() == Symbol::fromQualString("tsmem::autocast") && toIValue(n->input(3)) &&
          graph_of(method_called_by_op(n)))
        return n;
  return nullptr;
}

void set_ops(MethodDiff& d, OpDifference ops) {
  d.removed_ops = std::move(ops.removed);
  d.added_ops = std::move(ops.added);
  d.on_tensors = std::move(ops.on_tensors);
}

// One method's comparison; either may be missing.
MethodDiff compare(Function* a, Function* b, const std::string& name) {
  MethodDiff d;
  d.method = name;
  const Graph *ga = graph_of(a), *gb = graph_of(b);
  if (ga && gb) {
    // A method under autocast reads as its body, below a line that says so.
    const Node *amp_a = autocast_call(ga), *amp_b = autocast_call(gb);
    const auto body = [](const Graph* g, const Node* call) { return call ? graph_of(method_called_by_op(call)) : g; };
    const auto heading = [](const Node* call, std::vector<std::string>& lines) {
      if (call) lines.insert(lines.begin(), "under autocast to " + toIValue(call->input(3))->toStringRef() + ":");
    };
    auto lines = graph_lines(*body(ga, amp_a), *body(gb, amp_b));
    d.a = std::move(lines.a);
    d.b = std::move(lines.b);
    heading(amp_a, d.a);
    heading(amp_b, d.b);
    d.status = d.a == d.b ? "same" : "changed";
  } else {
    d.status = ga ? "removed" : gb ? "added" : "same";
    if (ga) d.a = graph_lines(*ga);
    if (gb) d.b = graph_lines(*gb);
  }
  if (d.status != "same") set_ops(d, op_difference(ga, gb));
  return d;
}

std::vector<Function*> functions_of(const c10::ClassType* type) {
  std::vector<Function*> all;
  if (!type) return all;
  all = type->methods();
  for (auto hooks : {&type->getForwardPreHooks(), &type->getForwardHooks()})
    all.insert(all.end(), hooks->begin(), hooks->end());
  return all;
}

std::vector<std::string> attribute_lines(const c10::ClassType& type) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < type.numAttributes(); ++i) {
    std::string kind = type.is_parameter(i) ? " (parameter)" : type.is_buffer(i) ? " (buffer)" : "";
    auto class_type = type.getAttribute(i)->cast<c10::ClassType>();
    // A submodule of another class is compared as that, where it stands.
    std::string what =
        class_type && class_type->is_module() ? "module" : unmangled(type.getAttribute(i)->annotation_str());
    lines.push_back(type.getAttributeName(i) + ": " + what + kind);
  }
  for (size_t i = 0; i < type.numConstants(); ++i)
    lines.push_back(type.getConstantName(i) + " = " + constant_text(type.getConstant(i)));
  return lines;
}

// Functions that the methods call, at any depth, by name; several of one name in the order in which they are met.
using Functions = std::map<std::string, std::vector<Function*>>;
void collect_functions(const Block* b, Functions& functions, std::unordered_set<Function*>& seen) {
  for (const Node* n : b->nodes()) {
    if (Function* f = called_function(n); f && seen.insert(f).second)
      if (const Graph* g = graph_of(f)) {
        functions[unmangled(f->qualname().qualifiedName())].push_back(f);
        collect_functions(g->block(), functions, seen);
      }
    for (const Block* inner : n->blocks()) collect_functions(inner, functions, seen);
  }
}

// PyTorch's own classes and functions; what stands in a container is the model's own doing.
bool is_of_torch(const std::string& name) {
  const auto plain = unmangled(name);
  return plain.starts_with("torch.") && !plain.starts_with("torch.nn.modules.container.");
}

struct Pair {  // classes that stand at the same places of the two trees; one may be missing
  const c10::ClassType *a, *b;
  std::vector<std::string> paths;
};

std::vector<Pair> pair_classes(const Module& a, const Module& b) {
  std::vector<Pair> pairs;
  std::map<std::pair<const c10::ClassType*, const c10::ClassType*>, size_t> index;
  std::function<void(const Module*, const Module*, const std::string&)> walk = [&](const Module* x, const Module* y,
                                                                                   const std::string& path) {
    auto tx = x ? x->type().get() : nullptr, ty = y ? y->type().get() : nullptr;
    auto [it, is_new] = index.emplace(std::make_pair(tx, ty), pairs.size());
    if (is_new) pairs.push_back({tx, ty, {}});
    pairs[it->second].paths.push_back(path);
    std::map<std::string, Module> in_b;
    std::vector<std::string> names_b;
    if (y)
      for (const auto& child : y->named_children()) {
        in_b.emplace(child.name, child.value);
        names_b.push_back(child.name);
      }
    auto inner = [&](const std::string& name) { return path.empty() ? name : path + "." + name; };
    if (x)
      for (const auto& child : x->named_children()) {
        auto other = in_b.find(child.name);
        walk(&child.value, other == in_b.end() ? nullptr : &other->second, inner(child.name));
        if (other != in_b.end()) in_b.erase(other);
      }
    for (auto& name : names_b)
      if (auto it = in_b.find(name); it != in_b.end()) walk(nullptr, &it->second, inner(name));
  };
  walk(&a, &b, "");
  return pairs;
}

// Whether methods of this name are compared.
using Wanted = std::function<bool(const std::string& name)>;

// The functions that the wanted methods of some classes call. A class may be missing.
Functions called_functions(const std::vector<const c10::ClassType*>& classes, const Wanted& wanted) {
  Functions functions;
  std::unordered_set<Function*> seen;
  for (const auto* type : classes)
    for (Function* f : functions_of(type))
      if (auto g = graph_of(f); g && wanted(f->name())) collect_functions(g->block(), functions, seen);
  return functions;
}

// The attributes of two classes, where they differ.
std::vector<MethodDiff> compare_attributes(const Pair& pair) {
  if (!pair.a || !pair.b) return {};
  MethodDiff d;
  d.method = "(attributes)";
  d.status = "changed";
  d.a = attribute_lines(*pair.a);
  d.b = attribute_lines(*pair.b);
  return d.a == d.b ? std::vector<MethodDiff>() : std::vector<MethodDiff>{std::move(d)};
}

std::vector<MethodDiff> compare_methods(const Pair& pair, const Wanted& wanted) {
  std::vector<MethodDiff> result;
  std::map<std::string, Function*> in_b;
  for (Function* f : functions_of(pair.b))
    if (wanted(f->name())) in_b[f->name()] = f;
  for (Function* f : functions_of(pair.a)) {
    if (!wanted(f->name())) continue;
    auto other = in_b.find(f->name());
    result.push_back(compare(f, other == in_b.end() ? nullptr : other->second, f->name()));
    if (other != in_b.end()) in_b.erase(other);
  }
  for (Function* f : functions_of(pair.b))
    if (in_b.count(f->name())) result.push_back(compare(nullptr, f, f->name()));
  return result;
}

// Functions of both models whose bodies differ. Of one that is no longer called, the callers differ.
std::vector<MethodDiff> compare_functions(const Functions& all_a, const Functions& all_b) {
  std::vector<MethodDiff> result;
  for (auto& [name, a] : all_a) {
    auto found = all_b.find(name);
    if (found == all_b.end()) continue;
    auto& b = found->second;
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      auto d = compare(a[std::min(i, a.size() - 1)], b[std::min(i, b.size() - 1)], "");
      if (d.status == "same") continue;
      auto dot = name.rfind('.');
      d.path = dot == name.npos ? "" : name.substr(0, dot);
      d.method = dot == name.npos ? name : name.substr(dot + 1);
      d.instances = {d.path};
      d.type = "function";
      d.of_torch = is_of_torch(name);
      result.push_back(std::move(d));
    }
  }
  return result;
}

void check_method(const std::string& method, const std::vector<Pair>& pairs) {
  std::set<std::string> known;
  for (const Pair& pair : pairs)
    for (const auto* type : {pair.a, pair.b})
      for (Function* f : functions_of(type)) known.insert(f->name());
  if (known.count(method)) return;
  auto near = nearest(method, {known.begin(), known.end()});
  throw Error(ErrorKind::request, "Neither model has a method '" + method + "'" +
                                      (near.empty() ? "" : " (did you mean '" + near + "'?)") + ".");
}

}  // namespace

std::vector<MethodDiff> diff(const Module& a, const Module& b, const std::string& method) {
  const std::vector<Pair> pairs = pair_classes(a, b);
  if (!method.empty()) check_method(method, pairs);
  const Wanted wanted = [&](const std::string& name) { return method.empty() ? !is_added_name(name) : name == method; };
  std::vector<MethodDiff> result;
  std::vector<const c10::ClassType*> classes_a, classes_b;
  for (const Pair& pair : pairs) {
    auto found = method.empty() ? compare_attributes(pair) : std::vector<MethodDiff>();
    for (auto& d : compare_methods(pair, wanted)) found.push_back(std::move(d));
    for (auto& d : found) {
      d.path = pair.paths[0];
      d.instances = pair.paths;
      const auto& name = *(pair.a ? pair.a : pair.b)->name();
      d.type = name.name();
      d.of_torch = is_of_torch(name.qualifiedName());
      result.push_back(std::move(d));
    }
    classes_a.push_back(pair.a);
    classes_b.push_back(pair.b);
  }
  for (auto& d : compare_functions(called_functions(classes_a, wanted), called_functions(classes_b, wanted)))
    result.push_back(std::move(d));
  return result;
}

MethodDiff total_difference(const Module& a, const Module& b, const std::string& method) {
  const auto graph = [&](const Module& m) -> const Graph* {
    const auto found = m.find_method(method);
    return found ? graph_of(&found->function()) : nullptr;
  };
  MethodDiff d;
  d.method = method;
  set_ops(d, total_op_difference(graph(a), graph(b)));
  d.status = d.removed_ops.empty() && d.added_ops.empty() ? "same" : "changed";
  return d;
}

ChangedOps changed_ops(const MethodDiff& d) {
  // Arithmetic on sizes and checks of arguments would drown the rest.
  auto on_tensors = [&](const std::map<std::string, int>& ops) {
    std::map<std::string, int> result;
    for (auto& op : ops)
      if (d.on_tensors.count(op.first)) result.insert(op);
    return result;
  };
  ChangedOps ops{on_tensors(d.removed_ops), on_tensors(d.added_ops)};
  if (ops.removed.empty() && ops.added.empty()) return {d.removed_ops, d.added_ops};
  return ops;
}

}  // namespace tsmem
