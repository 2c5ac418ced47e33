#include "rewriter/compare/op_counts.h"

#include <torch/csrc/jit/ir/constants.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "rewriter/method_call.h"

namespace tsmem {

using namespace torch::jit;

namespace {

std::string called_method_class(const Node* call) {
  auto type = call->input(0)->type()->cast<c10::NamedType>();
  return type && type->name() ? type->name()->name() : "";
}

// Operators, and calls with what they call, however deep in branches; what only moves values about is left out, and so
// are branches that a call's constant arguments rule out.
struct Ops {
  using Constants = std::unordered_map<const Value*, bool>;
  struct Call {
    Function* function;  // null where it isn't known before run time
    Constants known;     // the callee's inputs that are constant here
  };
  std::map<std::string, int> ops;
  std::set<std::string> on_tensors;  // those with a tensor among their results
  std::map<std::string, std::vector<Call>> calls;

  static std::optional<bool> constant(const Value* v, const Constants& known) {
    if (auto it = known.find(v); it != known.end()) return it->second;
    auto value = toIValue(v);
    return value && value->isBool() ? std::optional(value->toBool()) : std::nullopt;
  }

  void call(const std::string& name, Function* f, at::ArrayRef<const Value*> arguments, const Constants& known) {
    Call c{f, {}};
    if (auto g = graph_of(f))
      for (size_t i = 0; i < std::min(arguments.size(), g->inputs().size()); ++i)
        if (auto value = constant(arguments[i], known)) c.known[g->inputs()[i]] = *value;
    calls[name].push_back(std::move(c));
  }

  void add(const Block* b, const Constants& known = {}) {
    for (const Node* n : b->nodes()) {
      if (n->kind() == prim::CallMethod) {
        call(called_method_class(n) + "." + n->s(attr::name), called_method(n), n->inputs(), known);
      } else if (auto function = called_function(n)) {
        call(function->name(), function, n->inputs().slice(1), known);
      } else if (!n->kind().is_prim()) {
        const std::string name = n->kind().toQualString();
        ++ops[name];
        for (const Value* out : n->outputs())
          if (out->type()->isSubtypeOf(*c10::OptionalType::ofTensor())) on_tensors.insert(name);
        if (Function* method = method_called_by_op(n)) {
          on_tensors.insert(name);
          call(called_method_class(n) + "." + method->name(), method, {}, known);
        }
      }
      auto decided = n->kind() == prim::If ? constant(n->input(0), known) : std::nullopt;
      for (size_t i = 0; i < n->blocks().size(); ++i)
        if (!decided || *decided == (i == 0)) add(n->blocks()[i], known);
    }
  }

  // Puts a call's contents in its place.
  void expand(const std::string& name) {
    Call c = std::move(calls[name].back());
    calls[name].pop_back();
    if (auto g = graph_of(c.function))
      add(g->block(), c.known);
    else
      ++ops["call " + name];
  }

  void expand_all() {
    for (bool again = true; again;) {
      std::vector<std::string> names;
      for (auto& [name, found] : calls)
        for (size_t i = 0; i < found.size(); ++i) names.push_back(name);
      for (auto& name : names) expand(name);
      again = !names.empty();
    }
  }
};

// What `a` has more of, and `b`. Of calls that only one has, the contents count: a call that was replaced by the
// operators that it makes is no change.
OpDifference compare_ops(Ops a, Ops b) {
  OpDifference d;
  std::set<std::string> names;
  for (bool again = true; again;) {
    again = false;
    names.clear();
    for (auto side : {&a, &b})
      for (auto& [name, functions] : side->calls) names.insert(name);
    for (auto& name : names)
      while (a.calls[name].size() != b.calls[name].size()) {
        (a.calls[name].size() > b.calls[name].size() ? a : b).expand(name);
        again = true;
      }
  }
  d.on_tensors = a.on_tensors;
  d.on_tensors.insert(b.on_tensors.begin(), b.on_tensors.end());
  for (auto& [op, n] : a.ops)
    if (int less = n - b.ops[op]; less > 0) d.removed[op] = less;
  for (auto& [op, n] : b.ops)
    if (int more = n - a.ops[op]; more > 0) d.added[op] = more;
  return d;
}

Ops ops_of(const Graph* g) {
  Ops ops;
  if (g) ops.add(g->block());
  return ops;
}

}  // namespace

OpDifference op_difference(const Graph* a, const Graph* b) { return compare_ops(ops_of(a), ops_of(b)); }

OpDifference total_op_difference(const Graph* a, const Graph* b) {
  Ops all_a = ops_of(a), all_b = ops_of(b);
  all_a.expand_all();
  all_b.expand_all();
  return compare_ops(std::move(all_a), std::move(all_b));
}

}  // namespace tsmem
