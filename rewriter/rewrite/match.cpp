#include "rewriter/rewrite/match.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/ir/constants.h>

#include "ops/common.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/rewrite/apply.h"
#include "rewriter/rewrite/legality.h"
#include "rewriter/rewrite/order.h"
#include "rewriter/rewrite/preoptimized.h"
#include "rewriter/stays/saved_by.h"

namespace tsmem {

using namespace torch::jit;

bool asks_for_sizes(const Node* n, const Rule& rule) {
  if (rule.sizes.empty()) return false;
  if (n->kind() != aten::sym_size) return n->kind() == aten::size || n->kind() == aten::dim;
  return c10::Dispatcher::singleton().findSchema({parse_lines(rule.sizes).front().op, "dim"}).has_value();
}

const Scope* common_scope(const Scope* a, const Scope* b) {
  std::unordered_set<const Scope*> up;
  for (const Scope* s = a; s; s = s->parent) up.insert(s);
  for (const Scope* s = b; s; s = s->parent)
    if (up.count(s)) return s;
  return nullptr;
}

namespace {

// The lines of a `match`, which every method of a model is searched for.
const std::vector<Line>& lines_of(const std::string& match) {
  static thread_local std::unordered_map<std::string, std::vector<Line>> known;
  const auto found = known.find(match);
  return found != known.end() ? found->second : known.emplace(match, canonical_lines(match)).first->second;
}

bool same_value(const c10::IValue& x, const c10::IValue& y) {
  const auto is_number = [](const c10::IValue& v) { return v.isInt() || v.isDouble(); };
  if (is_number(x) && is_number(y)) return x.toScalar().toDouble() == y.toScalar().toDouble();
  if (x.isBool() || y.isBool()) return x.isBool() && y.isBool() && x.toBool() == y.toBool();
  if (x.isString() && y.isString()) return x.toStringRef() == y.toStringRef();
  return x.isNone() && y.isNone();
}

// Whether a constant has a literal's value. Numbers are compared as numbers, whatever their type.
bool is_constant(Value* v, const c10::IValue& wanted) {
  std::optional<c10::IValue> c = toIValue(v);
  if (!c && v->node()->kind() == prim::ListConstruct && wanted.isList()) {
    const auto elements = wanted.toListRef();
    if (elements.size() != v->node()->inputs().size()) return false;
    for (size_t i = 0; i < elements.size(); ++i)
      if (!is_constant(v->node()->input(i), elements[i])) return false;
    return true;
  }
  if (!c) return false;
  if (c->isTensor()) c = traced_number(v);
  if (!c) return false;
  if (c->isList() && wanted.isList()) {
    const auto x = c->toListRef(), y = wanted.toListRef();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), same_value);
  }
  return same_value(*c, wanted);
}

class Matcher {
 public:
  Matcher(const View& view, const std::vector<const Pattern*>& patterns, const Attributes& attributes)
      : view_(view),
        operators_(collect_operators(view, attributes)),
        sharing_(view, operators_, attributes),
        legality_(view, operators_, sharing_) {
    for (const Pattern* p : patterns)
      for (const Rule& r : p->rules) {
        const auto& lines = lines_of(r.match);
        if (!operators_.by_name.count(lines.back().op)) continue;
        CompiledRule c{p, &r, lines, {}};
        for (size_t i = 0; i < c.lines.size(); ++i)
          for (const std::string& out : c.lines[i].outputs) c.defined_by[out] = i;
        rules_.push_back(std::move(c));
      }
  }

  MatchResult run() {
    // Rule by rule, so that an earlier pattern has the first choice everywhere.
    for (const CompiledRule& rule : rules_) {
      for (Node* n : operators_.by_name.at(rule.lines.back().op)) try_rule(rule, n);
    }
    mark_overwritten();
    return std::move(result_);
  }

 private:
  const View& view_;
  const Operators operators_;
  Sharing sharing_;
  const Legality legality_;
  std::vector<CompiledRule> rules_;
  std::unordered_set<const Node*> taken_;
  bool swapped_first_ = false;
  std::vector<Attempt> accepted_;  // of each of result_.found
  MatchResult result_;

  void refuse(const CompiledRule& rule, const Attempt& a, std::string reason) {
    const Scope* scope = nullptr;
    bool first = true;
    for (Node* n : a.nodes)
      if (n) {
        const Scope* s = view_.places.at(n).scope;
        scope = first ? s : common_scope(scope, s);
        first = false;
      }
    result_.refused.push_back({rule.pattern, scope, std::move(reason)});
  }

  // Whether an activation is the one that the line names.
  static bool is_act(const CanonicalOp& op, const Line& line) {
    return !line.act || (op.act == line.act->act && (!line.act->args || *line.act->args == op.act_args));
  }

  // Binds line `i` to `n` and what leads to it. False: not this pattern.
  bool bind(const CompiledRule& rule, size_t i, Node* n, Attempt& a, bool swap) {
    auto op = operators_.canonical.find(n);
    const Line& line = rule.lines[i];
    if (op == operators_.canonical.end() || n->outputs().size() < line.outputs.size()) return false;
    const bool named = op->second.name == line.op;
    if (!named && !(by_traced_number(op->second) && line.op == op->second.name + "_number")) return false;
    if (op->second.inputs.size() != line.arguments.size() || !is_act(op->second, line)) return false;
    a.nodes[i] = n;
    a.ops[i] = op->second;
    if (swap) std::swap(a.ops[i].inputs[0], a.ops[i].inputs[1]);
    for (size_t k = 0; k < line.outputs.size(); ++k) a.values[line.outputs[k]] = {i, k, true};
    for (size_t k = 0; k < line.arguments.size(); ++k) {
      const std::string& argument = line.arguments[k];
      Value* v = a.ops[i].inputs[k];
      if (!is_value(argument)) {
        if (!is_constant(v, *literal_value(argument))) return false;
        continue;
      }
      const std::string name = argument.substr(1);
      auto producer = rule.defined_by.find(name);
      if (producer != rule.defined_by.end()) {
        if (a.nodes[producer->second]) {
          if (a.bound[name] != v) return false;
          continue;
        }
        const auto& outs = rule.lines[producer->second].outputs;
        const size_t k_out = std::find(outs.begin(), outs.end(), name) - outs.begin();
        if (v->node()->outputs().size() <= k_out || v->offset() != k_out) return false;
        a.bound[name] = v;
        if (!bind_either(rule, producer->second, v->node(), a)) return false;
      } else if (auto it = a.bound.find(name); it != a.bound.end()) {
        if (it->second != v) return false;
      } else {
        a.bound[name] = v;
        size_t index = 0;
        while (n->input(index) != v) ++index;
        a.values[name] = {i, index, false};
      }
    }
    return true;
  }

  bool bind_either(const CompiledRule& rule, size_t i, Node* n, Attempt& a) {
    Attempt before = a;
    const bool swaps = commutes(rule.lines[i].op);
    if (bind(rule, i, n, a, swaps && swapped_first_)) return true;
    if (!swaps) return false;
    a = std::move(before);
    return bind(rule, i, n, a, !swapped_first_);
  }

  // The operands of add and mul may be bound in two ways; the second is tried where the first may not be replaced.
  void try_rule(const CompiledRule& rule, Node* anchor) {
    if (taken_.count(anchor)) return;
    std::string first_reason;
    std::optional<Attempt> first;
    for (bool swapped_first : {false, true}) {
      swapped_first_ = swapped_first;
      Attempt a{std::vector<Node*>(rule.lines.size()), std::vector<CanonicalOp>(rule.lines.size()), {}, {}};
      if (!bind_either(rule, rule.lines.size() - 1, anchor, a)) return;
      if (first && first->nodes == a.nodes) break;
      for (Node* n : a.nodes)
        if (!n || taken_.count(n)) return;
      if (!wanted_activation(rule, a) || !well_fed(rule, a)) return;
      const std::string reason = legality_.refusal(rule, a);
      if (reason.empty()) return accept(rule, a);
      if (!first) {
        first_reason = reason;
        first = std::move(a);
      }
    }
    refuse(rule, *first, first_reason);
  }

  static bool wanted_activation(const CompiledRule& rule, const Attempt& a) {
    const auto& wanted = rule.rule->activations;
    for (const CanonicalOp& op : a.ops)
      if (op.name == "act" && !wanted.empty() && !wanted.count(op.act) && !(op.in_place && wanted.count("in-place")))
        return false;
    return true;
  }

  bool well_fed(const CompiledRule& rule, const Attempt& a) const {
    const auto& wanted = rule.rule->fed_by;
    if (wanted.empty()) return true;
    for (size_t i = 0; i < a.ops.size(); ++i) {
      const CanonicalOp& op = a.ops[i];
      if (wanted.count("kept") && keeps_all(op, wanted)) return true;
      // Beside what is overwritten and can't be made again, an operand that only runs is nobody's to keep.
      const auto gains = [&](const Value* v) {
        return feeds(v, wanted) && (!op.in_place || v == a.nodes[i]->input(0) || keeps(a.nodes[i], v));
      };
      if (std::any_of(op.inputs.begin(), op.inputs.end(), gains)) return true;
    }
    return false;
  }

  // Whether every tensor that op takes is kept anyway. What overwrites makes no tensor that could be saved, and a list
  // that is made again holds all its pieces.
  bool keeps_all(const CanonicalOp& op, const std::set<std::string>& replaced) const {
    std::vector<const Value*> tensors;
    for (const Value* v : op.inputs) {
      if (v->type()->kind() == ListType::Kind && v->type()->isSubtypeOf(*ListType::ofTensors())) return false;
      if (may_be_tensor(v) && v->node()->kind() != prim::Constant) tensors.push_back(v);
    }
    return !op.in_place && !tensors.empty() &&
           std::all_of(tensors.begin(), tensors.end(), [&](const Value* v) { return kept_anyway(v, replaced); });
  }

  // Whether an operator that reads the tensor v, and is replaced as well, keeps it for backward. The ones that stay
  // keep it without a word to ours.
  bool kept_anyway(const Value* v, const std::set<std::string>& replaced) const {
    return std::any_of(v->uses().begin(), v->uses().end(), [&](const Use& use) {
      const auto known = operators_.canonical.find(use.user);
      return known != operators_.canonical.end() &&
             (replaced.count(known->second.name) || known->second.name.find("conv") != std::string::npos) &&
             keeps(use.user, v);
    });
  }

  // Whether backward of n, as PyTorch has it, needs the tensor v.
  static bool keeps(const Node* n, const Value* v) {
    const FunctionSchema* schema = n->maybeSchema();
    const auto saved = schema ? saved_by(n->kind().toQualString()) : std::nullopt;
    const auto input = [&](const std::string& argument) -> const Value* {
      const auto i = schema->argumentIndexWithName(argument);
      return i && static_cast<size_t>(*i) < n->inputs().size() ? n->input(*i) : nullptr;
    };
    const auto needs_gradient = [&](const Value* of) {
      return of && may_be_tensor(of) && of->node()->kind() != prim::Constant &&
             !never_needs_gradient(of->node()->kind().toQualString());
    };
    return saved && std::any_of(saved->parts.begin(), saved->parts.end(), [&](const SavedBy::Part& part) {
             return input(part.argument) == v && (part.gradient_of.empty() || needs_gradient(input(part.gradient_of)));
           });
  }

  bool feeds(const Value* v, const std::set<std::string>& wanted) const {
    const Node* from = v->node();
    if (from->kind() == prim::ListConstruct)
      return std::any_of(from->inputs().begin(), from->inputs().end(),
                         [&](const Value* piece) { return may_be_tensor(piece) && feeds(piece, wanted); });
    if (from->kind() == prim::ListUnpack) from = from->input()->node();  // a piece of chunk, split or unbind
    if (from->kind() == prim::If) return true;
    if (from->kind() == prim::GetAttr && wanted.count("parameter") && may_be_tensor(v)) return true;
    const auto known = operators_.canonical.find(from);
    return known != operators_.canonical.end() && wanted.count(known->second.name);
  }

  // Where one op stands for several: whose memory its result is in.
  static int64_t memory_of_result(const Attempt& a) {
    for (size_t i = a.nodes.size() - 1; a.ops[i].in_place;) {
      const auto overwritten = std::find(a.nodes.begin(), a.nodes.end(), a.nodes[i]->input(0)->node());
      if (overwritten == a.nodes.end()) return kFirst;
      i = overwritten - a.nodes.begin();
      if (!a.ops[i].in_place) return kSecond;
    }
    return kNew;
  }

  void accept(const CompiledRule& rule, const Attempt& a) {
    FoundMatch found{rule.pattern, rule.rule, {}, a.values, "", {}, nullptr};
    for (size_t i = 0; i < a.nodes.size(); ++i) {
      if (a.ops[i].name == "act") {
        found.act = a.ops[i].act;
        found.act_args = a.ops[i].act_args;
        found.act_in_place = a.ops[i].in_place;
      } else if (a.ops[i].name == "add" || a.ops[i].name == "mul") {
        const bool swapped = a.ops[i].inputs[0] != a.nodes[i]->input(0);
        found.in_place = a.ops[i].in_place ? (swapped ? 2 : 1) : (swapped ? 3 : 0);
      } else if (a.nodes.size() == 1) {
        found.in_place = a.ops[i].in_place;
      }
      // Whether anything uses its result or not: it draws.
      if (a.ops[i].in_place && is_dropout(Symbol::aten(a.ops[i].name)) && a.nodes[i]->input(0)->uses().size() > 1)
        found.draws_for_others = true;
      if (a.nodes[i]->kind() == aten::dropout && gives_overwritten_input(a.nodes[i])) {
        found.makes_new = name_of(view_, a.nodes[i]);
        found.argument_is_seen = legality_.argument_is_seen(a.nodes[i]);
      }
      taken_.insert(a.nodes[i]);
      found.nodes.push_back(view_.places.at(a.nodes[i]));
      found.scope = i == 0 ? found.nodes[0].scope : common_scope(found.scope, found.nodes[i].scope);
    }
    if (rewrite_lines(rule.rule->rewrite).front().op == "tsmem::composed_act") found.in_place = memory_of_result(a);
    for (const auto& [name, v] : a.bound) {
      auto place = view_.places.find(v->node());
      const bool inner = std::find(a.nodes.begin(), a.nodes.end(), v->node()) != a.nodes.end();
      if (!inner && place != view_.places.end() && v->node()->kind() != prim::GetAttr && !toIValue(v) &&
          v->type()->isSubtypeOf(*TensorType::get()))
        found.sources.push_back(place->second);
    }
    result_.found.push_back(std::move(found));
    accepted_.push_back(a);
  }

  struct Write {
    Node* node;
    Value* tensor;
    bool always;      // may happen before any node runs again in backward: to memory that outlives a call
    bool statistics;  // of a norm: no argument's memory
  };

  // What is written in place by nodes that stay, other than counters, and the statistics that norms update, which their
  // schemas don't say.
  void collect_writes(Block* block, std::vector<Write>& writes) {
    const auto add = [&](Node* n, Value* v, bool statistics) {
      writes.push_back({n, v, !sharing_.made_here(v), statistics});
    };
    for (Node* n : block->nodes()) {
      for (Block* b : n->blocks()) collect_writes(b, writes);
      if (updates_statistics(n))
        for (size_t k : {3, 4}) add(n, n->input(k), /*statistics=*/true);
      for (Value* v : given_unseen(n)) writes.push_back({n, v, /*always=*/true, /*statistics=*/false});
      const FunctionSchema* schema = n->maybeSchema();
      if (!schema || !schema->is_mutable() || taken_.count(n)) continue;
      for (size_t k = 0; k < schema->arguments().size() && k < n->inputs().size(); ++k) {
        const auto* alias = schema->arguments()[k].alias_info();
        if (!alias || !alias->isWrite() || !may_be_tensor(n->input(k))) continue;
        if (!sharing_.is_counter(n->input(k))) add(n, n->input(k), /*statistics=*/false);
      }
    }
  }

  // What the match reads when it runs again.
  std::set<Value*> read_again(const Attempt& a, const FoundMatch& found) const {
    std::set<Value*> read;
    for (const Line& line : rewrite_lines(found.rule->rewrite))
      for (const std::string& argument : line.arguments)
        if (auto it = a.bound.find(argument.substr(argument[0] == '%')); it != a.bound.end()) read.insert(it->second);
    // A norm that updates its statistics makes nothing from them.
    for (const Node* n : a.nodes)
      if (updates_statistics(n))
        for (size_t k : {3, 4}) read.erase(n->input(k));
    return read;
  }

  // An op that offers its output to be recomputed makes its users keep what it has read, which the original's need not:
  // a tensor that is written to later must not be among that.
  void mark_overwritten() {
    std::vector<Write> writes;
    collect_writes(view_.graph->block(), writes);
    for (Value* written : view_.overwritten_unused) writes.push_back({nullptr, written, true, false});
    for (size_t i = 0; i < accepted_.size(); ++i) {
      const Attempt& a = accepted_[i];
      FoundMatch& found = result_.found[i];
      const auto lines = rewrite_lines(found.rule->rewrite);
      if (std::none_of(lines.begin(), lines.end(),
                       [](const Line& line) { return offers_recompute(line.op) != Offers::nothing; }))
        continue;
      const auto read = read_again(a, found);
      if (std::any_of(read.begin(), read.end(), [&](Value* v) { return sharing_.written_by_the_model(v); })) {
        found.overwritten_by = "a method of the model";
        continue;
      }
      const auto write = std::find_if(writes.begin(), writes.end(), [&](const Write& w) {
        return (w.always || may_run_after(w.node, a.nodes.back())) &&
               std::any_of(read.begin(), read.end(), [&](Value* v) {
                 return (!w.statistics || sharing_.may_be_attribute(v)) && sharing_.reaches(w.tensor, v);
               });
      });
      if (write != writes.end())
        found.overwritten_by = write->node ? name_of(view_, write->node) : "code whose result nothing uses";
    }
  }
};

}  // namespace

MatchResult find_matches(const View& view, const std::vector<const Pattern*>& patterns, const Attributes& attributes) {
  return Matcher(view, patterns, attributes).run();
}

}  // namespace tsmem
