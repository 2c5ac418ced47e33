#include "rewriter/rewrite/match.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>

#include <unordered_set>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/apply.h"

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

static bool is_tensor(const Value* v) {
  return v->type()->isSubtypeOf(*OptionalType::ofTensor()) && v->type()->kind() != NoneType::Kind;
}

namespace {

struct CompiledRule {
  const Pattern* pattern;
  const Rule* rule;
  const std::vector<Line>& lines;
  std::map<std::string, size_t> defined_by;  // inner value -> line
};

// The lines of a `match`, which every method of a model is searched for.
const std::vector<Line>& lines_of(const std::string& match) {
  static thread_local std::unordered_map<std::string, std::vector<Line>> known;
  const auto found = known.find(match);
  return found != known.end() ? found->second : known.emplace(match, canonical_lines(match)).first->second;
}

struct Attempt {
  std::vector<Node*> nodes;      // by line
  std::vector<CanonicalOp> ops;  // by line
  std::map<std::string, Value*> bound;
  std::map<std::string, Operand> values;
};

class Matcher {
 public:
  Matcher(const View& view, const std::vector<const Pattern*>& patterns, const Attributes& attributes)
      : view_(view), attributes_(attributes) {
    for (const Pattern* p : patterns)
      for (const Rule& r : p->rules) {
        CompiledRule c{p, &r, lines_of(r.match), {}};
        for (size_t i = 0; i < c.lines.size(); ++i)
          for (const std::string& out : c.lines[i].outputs) c.defined_by[out] = i;
        rules_.push_back(std::move(c));
      }
    collect(view.graph->block(), 0, 0);
  }

  MatchResult run() {
    // Rule by rule, so that an earlier pattern has the first choice everywhere.
    for (const CompiledRule& rule : rules_) {
      auto it = by_name_.find(rule.lines.back().op);
      if (it == by_name_.end()) continue;
      for (Node* n : it->second) try_rule(rule, n);
    }
    mark_overwritten();
    return std::move(result_);
  }

 private:
  const View& view_;
  const Attributes& attributes_;
  std::vector<CompiledRule> rules_;
  bool sets_attributes_ = false;
  std::unordered_map<std::string, std::vector<Node*>> by_name_;
  std::unordered_map<Node*, CanonicalOp> ops_;
  std::unordered_set<const Node*> taken_, in_autocast_, in_no_grad_;
  std::unordered_map<const Node*, int> with_blocks_;  // a number for the `with` blocks around a node
  int with_block_ = 0, last_with_block_ = 0;
  bool swapped_first_ = false;
  std::vector<Attempt> accepted_;  // of each of result_.found
  std::unique_ptr<AliasDb> alias_;
  std::vector<std::vector<Value*>> givers_;
  std::unordered_map<Value*, ValueSet> sharing_;
  MatchResult result_;

  // Whether n works on a counter (num_batches_tracked) or a table of integers: nothing of these is saved for backward.
  bool counts(const Node* n) const {
    const auto path = n->inputs().empty() ? std::nullopt : attribute_path(n->input(0));
    return path && !path->empty() && attributes_.integral(*path);
  }

  // Scripted autocast is lowered by a pass over aten ops between Enter and Exit: ours would miss its casts.
  // Under no_grad nothing is saved; and whether TorchScript takes a result there for one that needs a gradient depends
  // on which operators it finds there.
  void collect(Block* block, int autocast, int no_grad) {
    std::vector<int> around;
    for (Node* n : block->nodes()) {
      if (n->kind() == prim::SetAttr) sets_attributes_ = true;
      if (borders_autocast(n)) autocast += n->kind() == prim::Enter ? 1 : -1;
      if (autocast > 0) in_autocast_.insert(n);
      if (borders_no_grad(n)) no_grad += n->kind() == prim::Enter ? 1 : -1;
      if (no_grad > 0) in_no_grad_.insert(n);
      if (n->kind() == prim::Enter) {
        around.push_back(with_block_);
        with_block_ = ++last_with_block_;
      } else if (n->kind() == prim::Exit && !around.empty()) {
        with_block_ = around.back();
        around.pop_back();
      } else if (n->kind() == Symbol::fromQualString("aten::set_grad_enabled")) {
        with_block_ = ++last_with_block_;
      }
      with_blocks_[n] = with_block_;
      CanonicalOp op = canonical(n);
      if (!op.name.empty() && !counts(n)) {
        by_name_[op.name].push_back(n);
        if (by_traced_number(op)) by_name_[op.name + "_number"].push_back(n);
        ops_.emplace(n, std::move(op));
      }
      for (Block* b : n->blocks()) collect(b, autocast, no_grad);
    }
  }

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

  std::string name_of(const Node* n) const {
    const auto place = view_.places.find(n);
    const std::string path = place == view_.places.end() ? "" : module_path_of(place->second);
    return path.empty() ? n->kind().toQualString() : fmt::format("{} ({})", path, n->kind().toQualString());
  }

  // A sum or product with a number that was traced: a constant tensor without dimensions.
  static bool by_traced_number(const CanonicalOp& op) {
    return commutes(op.name) && traced_number(op.inputs[1]).has_value();
  }
  static std::optional<c10::IValue> traced_number(const Value* v) {
    const std::optional<c10::IValue> c = toIValue(v);
    if (!c || !c->isTensor() || !c->toTensor().defined() || c->toTensor().dim() != 0 || !c->toTensor().is_cpu())
      return std::nullopt;
    return c10::IValue(c->toTensor().item());
  }

  // Whether a constant has a literal's value. Numbers are compared as numbers, whatever their type.
  static bool is_constant(Value* v, const c10::IValue& wanted) {
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
  static bool same_value(const c10::IValue& x, const c10::IValue& y) {
    const auto is_number = [](const c10::IValue& v) { return v.isInt() || v.isDouble(); };
    if (is_number(x) && is_number(y)) return x.toScalar().toDouble() == y.toScalar().toDouble();
    if (x.isBool() || y.isBool()) return x.isBool() && y.isBool() && x.toBool() == y.toBool();
    if (x.isString() && y.isString()) return x.toStringRef() == y.toStringRef();
    return x.isNone() && y.isNone();
  }

  // Whether an activation is the one that the line names.
  static bool is_act(const CanonicalOp& op, const Line& line) {
    return !line.act || (op.act == line.act->act && (!line.act->args || *line.act->args == op.act_args));
  }

  // Binds line `i` to `n` and what leads to it. False: not this pattern.
  bool bind(const CompiledRule& rule, size_t i, Node* n, Attempt& a, bool swap) {
    auto op = ops_.find(n);
    const Line& line = rule.lines[i];
    if (op == ops_.end() || n->outputs().size() < line.outputs.size()) return false;
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
      const std::string reason = illegal(rule, a);
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
    for (const CanonicalOp& op : a.ops)
      for (const Value* v : op.inputs) {
        const Node* from = v->node();
        if (from->kind() == prim::ListUnpack) from = from->input()->node();  // a piece of chunk, split or unbind
        auto known = ops_.find(const_cast<Node*>(from));
        if (from->kind() == prim::If || (known != ops_.end() && wanted.count(known->second.name))) return true;
        if (from->kind() == prim::GetAttr && wanted.count("parameter") && is_tensor(v)) return true;
      }
    return false;
  }

  void accept(const CompiledRule& rule, const Attempt& a) {
    Found found{rule.pattern, rule.rule, {}, a.values, "", {}, nullptr};
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
      taken_.insert(a.nodes[i]);
      found.nodes.push_back(view_.places.at(a.nodes[i]));
      found.scope = i == 0 ? found.nodes[0].scope : common_scope(found.scope, found.nodes[i].scope);
    }
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

  // Why a match may not be replaced; empty where it may.
  std::string illegal(const CompiledRule& rule, const Attempt& a) {
    for (size_t i = 0; i < a.nodes.size(); ++i) {
      if (!a.ops[i].trouble.empty()) return fmt::format("{}: {}", name_of(a.nodes[i]), a.ops[i].trouble);
      if (in_autocast_.count(a.nodes[i]))
        return fmt::format("{} is inside an autocast block of the model's own code", name_of(a.nodes[i]));
      if (in_no_grad_.count(a.nodes[i]))
        return fmt::format("{} is inside a no_grad block, where nothing is saved", name_of(a.nodes[i]));
    }
    Node* anchor = a.nodes.back();
    for (Node* n : a.nodes)
      if (view_.unused.count(n)) return fmt::format("nothing uses the result of {}", name_of(n));
    for (Node* n : a.nodes)
      if (n->owningBlock() != anchor->owningBlock())
        return fmt::format("{} and {} are not in the same branch or loop", name_of(n), name_of(anchor));
    for (size_t i = 0; i + 1 < a.nodes.size(); ++i)
      for (size_t k = 0; k < a.nodes[i]->outputs().size(); ++k)
        if (auto reason = escapes(rule, a, i, k); !reason.empty()) return reason;
    if (auto reason = reads_inner_value(rule, a); !reason.empty()) return reason;
    for (size_t k = rule.lines.back().outputs.size(); k < anchor->outputs().size(); ++k)
      if (anchor->output(k)->hasUses())
        return fmt::format("another result of {} (its indices) is used", name_of(anchor));
    for (size_t i = 0; i < a.nodes.size(); ++i)
      if (a.ops[i].in_place)
        if (auto reason = seen_after(a.nodes[i]->input(0), a.nodes[i], a.nodes[i]); !reason.empty()) return reason;
    if (gives_its_input(anchor) && overwritten(anchor->output()))
      return fmt::format("where {} drops nothing, its result is its argument, and it is overwritten", name_of(anchor));
    if (auto reason = takes_none(rule, a); !reason.empty()) return reason;
    for (const std::string& name : rule.rule->intact) {
      Attempt kept = a;
      kept.bound = {{name, value_of(rule, a, name)}};
      if (auto reason = written_later(kept); !reason.empty()) return reason;
    }
    return disturbed(a);
  }

  // An input of the match, an inner value or a result.
  static Value* value_of(const CompiledRule& rule, const Attempt& a, const std::string& name) {
    const auto made = rule.defined_by.find(name);
    if (made == rule.defined_by.end()) return a.bound.at(name);
    const auto& outs = rule.lines[made->second].outputs;
    return a.nodes[made->second]->output(std::find(outs.begin(), outs.end(), name) - outs.begin());
  }

  // A dropout with p = 0, or in evaluation. TorchScript's own makes a tensor where it differentiates it: what
  // overwrites that may be what a view must not be given to, or what backward needs of the operator before.
  static bool gives_its_input(const Node* n) {
    if (!is_dropout(n->kind())) return false;
    const auto p = toIValue(n->input(1)), train = toIValue(n->input(2));
    return (p && p->isDouble() && p->toDouble() == 0) || !(train && train->isBool() && train->toBool());
  }

  // Whether v, or a view of it, is overwritten.
  static bool overwritten(const Value* v) {
    return std::any_of(v->uses().begin(), v->uses().end(), [](const Use& use) {
      const FunctionSchema* schema = use.user->maybeSchema();
      if (!schema || use.offset != 0) return false;
      if (schema->is_mutable()) return true;
      const bool passes_on =
          may_give_its_argument(use.user) || (!schema->returns().empty() && schema->returns()[0].alias_info());
      const auto outputs = use.user->outputs();
      return passes_on && std::any_of(outputs.begin(), outputs.end(), overwritten);
    });
  }

  // Why an op of the rewrite takes none of the bound values in some place: padding="same" where a list belongs.
  static std::string takes_none(const CompiledRule& rule, const Attempt& a) {
    for (const Line& line : rewrite_lines(rule.rule->rewrite)) {
      std::string reason;
      for (const auto& op : torch::jit::getAllOperatorsFor(Symbol::fromQualString(line.op))) {
        reason.clear();
        size_t at = 0;
        for (const std::string& argument : line.arguments) {
          const auto bound = a.bound.find(argument.substr(argument[0] == '%'));
          if (argument[0] == '%' && bound != a.bound.end() && at < op->schema().arguments().size()) {
            const auto& formal = op->schema().arguments()[at];
            if (!bound->second->type()->isSubtypeOf(*formal.type()))
              reason =
                  fmt::format("{} takes no {} of type {}", line.op, formal.name(), bound->second->type()->repr_str());
          }
          at += argument == "ACT" ? 2 : 1;
        }
        if (reason.empty()) break;
      }
      if (!reason.empty()) return reason;
    }
    return "";
  }

  // Whether something that may run after the match writes to what it keeps: what follows, all of a loop around it, and
  // dead code, wherever it stood.
  std::string written_later(const Attempt& kept) {
    for (Value* written : view_.overwritten_unused)
      for (const auto& [name, bound] : kept.bound)
        for (Value* v : tensors_of(bound))
          if (may_alias(written, v)) return "something whose result is not used writes to an input of the match";
    for (Node* n = kept.nodes.back(); n; n = n->owningBlock()->owningNode()) {
      for (Node* later = n->next(); later != n->owningBlock()->return_node(); later = later->next())
        if (auto reason = writes(later, kept, /*in_between=*/false); !reason.empty()) return reason;
      if (n->kind() == prim::Loop)
        if (auto reason = writes(n, kept, /*in_between=*/false); !reason.empty()) return reason;
    }
    return "";
  }

  // Whether `later` may run when n has run.
  static bool may_run_after(const Node* later, const Node* n) {
    const auto x = blocks_around(later), y = blocks_around(n);
    size_t shared = 0;
    for (; shared < x.size() && shared < y.size() && x[shared] == y[shared]; ++shared)
      if (x[shared]->owningNode() && x[shared]->owningNode()->kind() == prim::Loop) return true;
    const Node* in_x = shared < x.size() ? x[shared]->owningNode() : later;
    const Node* in_y = shared < y.size() ? y[shared]->owningNode() : n;
    return in_x != in_y && in_x->isAfter(in_y);
  }

  struct Write {
    Node* node;
    Value* tensor;
  };

  // What is written in place by nodes that stay, other than counters.
  void collect_writes(Block* block, std::vector<Write>& writes) {
    for (Node* n : block->nodes()) {
      for (Block* b : n->blocks()) collect_writes(b, writes);
      const FunctionSchema* schema = n->maybeSchema();
      if (!schema || !schema->is_mutable() || taken_.count(n)) continue;
      for (size_t k = 0; k < schema->arguments().size() && k < n->inputs().size(); ++k) {
        const auto* alias = schema->arguments()[k].alias_info();
        if (!alias || !alias->isWrite() || !is_tensor(n->input(k))) continue;
        const auto path = attribute_path(root(n->input(k)));
        if (!path || path->empty() || !attributes_.integral(*path)) writes.push_back({n, n->input(k)});
      }
    }
  }

  // An op that offers its output to be recomputed makes its users keep what it has read, which the original's need not:
  // a tensor that is written to later must not be among that. (Norms write to their statistics, and make nothing from
  // them that training needs.)
  void mark_overwritten() {
    std::vector<Write> writes;
    collect_writes(view_.graph->block(), writes);
    if (writes.empty() && view_.overwritten_unused.empty()) return;
    for (size_t i = 0; i < accepted_.size(); ++i) {
      const Attempt& a = accepted_[i];
      bool offers = false;
      std::set<Value*> read;
      for (const Line& line : rewrite_lines(result_.found[i].rule->rewrite)) {
        offers |= offers_recompute(line.op) != Offers::nothing;
        for (const std::string& argument : line.arguments)
          if (auto it = a.bound.find(argument.substr(argument[0] == '%')); it != a.bound.end()) read.insert(it->second);
      }
      if (!offers) continue;
      for (const Write& w : writes)
        if (may_run_after(w.node, a.nodes.back()))
          for (Value* v : read) result_.found[i].overwritten |= reaches(w.tensor, v);
      for (Value* written : view_.overwritten_unused)
        for (Value* v : read) result_.found[i].overwritten |= reaches(written, v);
    }
  }

  // Whether a write to `written` may change v, a tensor or a list of tensors.
  bool reaches(Value* written, Value* v) {
    if (is_tensor(v)) return may_alias(written, v);
    if (v->type()->kind() != ListType::Kind || v->type()->containedType(0)->kind() != TensorType::Kind) return false;
    if (v->node()->kind() != prim::ListConstruct) {
      const ValueSet& all = sharing(written);
      return std::any_of(all.begin(), all.end(),
                         [&](const Value* x) { return aliases().mayContainAlias(const_cast<Value*>(x), v); });
    }
    for (Value* element : v->node()->inputs())
      if (may_alias(written, element)) return true;
    return false;
  }

  AliasDb& aliases() {
    if (!alias_) alias_ = std::make_unique<AliasDb>(view_.graph);
    return *alias_;
  }

  // v, and what an operator that may give its argument on has from its memory or gives to it: LibTorch's analysis takes
  // the result of such an operator for a new tensor.
  const ValueSet& sharing(Value* v) {
    if (sharing_.empty()) collect_givers(view_.graph->block());
    const auto [known, is_new] = sharing_.try_emplace(v, ValueSet{v});
    ValueSet& all = known->second;
    if (!is_new) return all;
    std::vector<bool> added(givers_.size());
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t i = 0; i < givers_.size(); ++i) {
        if (added[i]) continue;
        const auto touches = [&](Value* part) {
          return std::any_of(all.begin(), all.end(),
                             [&](const Value* x) { return aliases().mayContainAlias(const_cast<Value*>(x), part); });
        };
        if (std::none_of(givers_[i].begin(), givers_[i].end(), touches)) continue;
        all.insert(givers_[i].begin(), givers_[i].end());
        added[i] = changed = true;
      }
    }
    return all;
  }

  // The tensors that each such operator takes and gives.
  void collect_givers(Block* block) {
    for (Node* n : block->nodes()) {
      for (Block* b : n->blocks()) collect_givers(b);
      if (!may_give_its_argument(n)) continue;
      std::vector<Value*>& shared = givers_.emplace_back();
      for (const auto& values : {n->inputs(), at::ArrayRef<Value*>(n->outputs())})
        for (Value* v : values)
          if (is_tensor(v) || v->type()->kind() == ListType::Kind) shared.push_back(v);
    }
  }

  // An inner value that something outside the match reads.
  std::string escapes(const CompiledRule& rule, const Attempt& a, size_t i, size_t k) {
    const auto& outs = rule.lines[i].outputs;
    if (k < outs.size() && rule.rule->shared.count(outs[k])) return "";
    const bool sized =
        k < outs.size() && !rule.rule->sizes.empty() && parse_lines(rule.rule->sizes).front().outputs[0] == outs[k];
    size_t others = 0;
    for (const Use& use : a.nodes[i]->output(k)->uses()) {
      const bool inside = std::find(a.nodes.begin(), a.nodes.end(), use.user) != a.nodes.end();
      if (!inside && !(sized && asks_for_sizes(use.user, *rule.rule))) ++others;
    }
    if (others == 0) return "";
    return fmt::format("the output of {} has {} other user{}", name_of(a.nodes[i]), others, others == 1 ? "" : "s");
  }

  // An inner value that the match reads as an operand of its own too: y * sigmoid(y), where y is a norm's output.
  std::string reads_inner_value(const CompiledRule& rule, const Attempt& a) const {
    for (const auto& [name, v] : a.bound) {
      if (rule.defined_by.count(name)) continue;
      const auto from = std::find(a.nodes.begin(), a.nodes.end(), v->node());
      if (from == a.nodes.end()) continue;
      const auto& outs = rule.lines[from - a.nodes.begin()].outputs;
      if (v->offset() < outs.size() && rule.rule->shared.count(outs[v->offset()])) continue;
      return fmt::format("the output of {} is also %{} of the match", name_of(v->node()), name);
    }
    return "";
  }

  // Whether only branches, no loops, lie between a block and a node in it.
  static bool in_branches_of(const Node* n, const Block* block) {
    while (n->owningBlock() != block) {
      n = n->owningBlock()->owningNode();
      if (!n || n->kind() != prim::If) return false;
    }
    return true;
  }

  // The blocks around a node, outermost first.
  static std::vector<const Block*> blocks_around(const Node* n) {
    std::vector<const Block*> blocks;
    for (const Block* b = n->owningBlock(); b; b = b->owningNode() ? b->owningNode()->owningBlock() : nullptr)
      blocks.insert(blocks.begin(), b);
    return blocks;
  }

  // Whether two nodes are in different branches of one If: at most one of them runs.
  static bool exclusive(const Node* a, const Node* b) {
    const auto x = blocks_around(a), y = blocks_around(b);
    for (size_t i = 0; i < x.size() && i < y.size(); ++i)
      if (x[i] != y[i]) return x[i]->owningNode() == y[i]->owningNode() && x[i]->owningNode()->kind() == prim::If;
    return false;
  }

  // Whether `a` has run when `b` runs, each in whichever branches or loops.
  static bool runs_before(const Node* a, const Node* b) {
    const auto x = blocks_around(a), y = blocks_around(b);
    size_t shared = 0;
    while (shared < x.size() && shared < y.size() && x[shared] == y[shared]) ++shared;
    const Node* in_x = shared < x.size() ? x[shared]->owningNode() : a;
    const Node* in_y = shared < y.size() ? y[shared]->owningNode() : b;
    return in_x->kind() != prim::Return && in_x != in_y && in_x->isBefore(in_y);
  }

  // Why the memory of v, which n overwrites, may be read by others when n has run; empty: then n may as well write
  // elsewhere. `user` is the user of v that leads to n.
  std::string seen_after(Value* v, Node* user, Node* n) {
    Node* producer = v->node();
    auto op = ops_.find(producer);
    const bool chained = op != ops_.end() && op->second.in_place;
    const bool branches = producer->kind() == prim::If;
    if (!chained && !branches && !makes_fresh_tensor(producer))
      return fmt::format("{} overwrites a tensor that may be seen from elsewhere", name_of(n));
    if (!in_branches_of(n, producer->owningBlock()) && !exits_into(producer, n))
      return fmt::format("{} overwrites a tensor made outside its loop", name_of(n));
    // Under no_grad the original's result is still the tensor with its history; a new tensor would have none.
    if (with_blocks_.at(producer) != with_blocks_.at(n))
      return fmt::format("{} overwrites a tensor made outside its `with` block", name_of(n));
    if (user->kind() == prim::Return && given_out_twice(v, user))
      return fmt::format("{} overwrites a tensor that its branch gives out twice", name_of(n));
    for (const Use& use : v->uses()) {
      if (use.user == user || exclusive(use.user, n)) continue;
      if (!runs_before(use.user, n) || !only_reads(use.user))
        return fmt::format("{} overwrites a tensor that {} uses too", name_of(n),
                           use.user->kind() == prim::Return ? "its caller" : name_of(use.user));
    }
    if (chained) return seen_after(producer->input(0), producer, n);
    if (branches)
      for (Block* b : producer->blocks())
        if (auto reason = seen_after(b->outputs()[v->offset()], b->return_node(), n); !reason.empty()) return reason;
    return "";
  }

  // Whether a branch has v among its results twice, and both are used.
  static bool given_out_twice(const Value* v, const Node* returns) {
    const Node* branches = returns->owningBlock()->owningNode();
    size_t used = 0;
    for (size_t i = 0; i < returns->inputs().size(); ++i)
      used += returns->input(i) == v && branches->output(i)->hasUses();
    return used > 1;
  }

  // Whether n follows an If that `inner` is in, with branches alone between them.
  static bool exits_into(const Node* inner, const Node* n) {
    for (const Node* p = inner; p; p = p->owningBlock()->owningNode()) {
      if (p != inner && p->kind() != prim::If) return false;
      if (in_branches_of(n, p->owningBlock())) return true;
    }
    return false;
  }

  // The new op reads all its inputs where the last matched node stood: nothing in between may write to them.
  std::string disturbed(const Attempt& a) {
    Node* first = a.nodes.back();
    for (Node* n : a.nodes)
      if (n->isBefore(first)) first = n;
    for (Node* n = first; n != a.nodes.back(); n = n->next()) {
      if (std::find(a.nodes.begin(), a.nodes.end(), n) != a.nodes.end()) continue;
      if (auto reason = writes(n, a, /*in_between=*/true); !reason.empty()) return reason;
    }
    return "";
  }

  // Whether n, or something in it, writes to what is bound. In between the matched operators nothing may be unknown.
  std::string writes(Node* n, const Attempt& a, bool in_between) {
    if (in_between && (n->kind() == prim::Enter || n->kind() == prim::Exit))
      return "a `with` block begins or ends between the matched operators";
    if (in_between && (n->kind() == prim::CallMethod || n->kind() == prim::CallFunction))
      return fmt::format("a call that can't be looked into ({}) lies between the matched operators",
                         n->kind() == prim::CallMethod ? n->s(attr::name) : "function");
    if (in_between && is_opaque(n)) return "an operator on functions lies between the matched operators";
    for (Block* b : n->blocks())
      for (Node* inner : b->nodes())
        if (auto reason = writes(inner, a, in_between); !reason.empty()) return reason;
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema) return "";
    // These write to their running statistics, and their schemas don't say so.
    const bool norm = n->kind() == aten::batch_norm || n->kind() == aten::instance_norm;
    if (!schema->is_mutable() && !norm) return "";
    for (size_t k = 0; k < schema->arguments().size() && k < n->inputs().size(); ++k) {
      const auto* alias = schema->arguments()[k].alias_info();
      const bool written = (alias && alias->isWrite()) || (norm && (k == 3 || k == 4) && is_tensor(n->input(k)));
      if (!written) continue;
      // What goes into a list or a dictionary, or leaves it, changes that and no tensor's memory.
      const bool container = !is_tensor(n->input(k)) && alias->containedTypes().empty();
      for (const auto& [name, bound] : a.bound)
        for (Value* v : container ? std::vector<Value*>{bound} : tensors_of(bound))
          if (v->node() != n && (container ? aliases().mayAlias(n->input(k), v) : may_alias(n->input(k), v)))
            return fmt::format("{} writes to {} of the match {}", name_of(n), is_result(v, a) ? "a result" : "an input",
                               in_between ? "in between" : "later");
    }
    return "";
  }

  // A tensor, or those of a list that is made here.
  static std::vector<Value*> tensors_of(Value* v) {
    if (is_tensor(v)) return {v};
    const bool tensors = v->node()->kind() == prim::ListConstruct && v->type()->isSubtypeOf(*ListType::ofTensors());
    return tensors ? v->node()->inputs().vec() : std::vector<Value*>{};
  }

  static bool is_result(const Value* v, const Attempt& a) {
    return std::find(a.nodes.begin(), a.nodes.end(), v->node()) != a.nodes.end();
  }

  bool may_alias(Value* x, Value* y) {
    x = root(x), y = root(y);
    if (x == y) return true;
    const bool fresh_x = makes_fresh_tensor(x->node()), fresh_y = makes_fresh_tensor(y->node());
    if (fresh_x && fresh_y) return false;
    // Memory that is new is not what was there before: LibTorch's analysis takes all that has been in a tuple for one.
    if ((fresh_x && runs_before(y->node(), x->node())) || (fresh_y && runs_before(x->node(), y->node()))) return false;
    const auto path_x = attribute_path(x), path_y = attribute_path(y);
    if (path_x && path_y && !path_x->empty() && !path_y->empty()) return attributes_.alias(*path_x, *path_y);
    // The tensors that patterns take are floating point; num_batches_tracked is not.
    if ((path_x && !path_x->empty() && attributes_.integral(*path_x)) ||
        (path_y && !path_y->empty() && attributes_.integral(*path_y)))
      return false;
    if (!sets_attributes_ && ((fresh_x && path_y) || (fresh_y && path_x))) return false;
    ValueSet from_x, from_y;
    if (collect_origins(x, from_x) && collect_origins(y, from_y)) return share_an_origin(from_x, from_y);
    const ValueSet& all = sharing(x);
    return std::any_of(all.begin(), all.end(),
                       [&](const Value* v) { return aliases().mayContainAlias(const_cast<Value*>(v), y); });
  }

  // Adds where the memory of v, a tensor or a list of tensors, comes from: new tensors, attributes and the graph's
  // inputs. False where that isn't known. LibTorch's analysis takes all that has been in a tuple or a list for one.
  bool collect_origins(Value* v, ValueSet& origins) {
    v = root(v);
    Node* n = v->node();
    const bool list = v->type()->kind() == ListType::Kind;
    if (list && !is_unpacked_only(v)) return false;
    if (v->type()->kind() == NoneType::Kind) return true;
    if (n->kind() == prim::If) {
      const auto of_branch = [&](Block* b) { return collect_origins(b->outputs()[v->offset()], origins); };
      return std::all_of(n->blocks().begin(), n->blocks().end(), of_branch);
    }
    if (!list) {
      const auto path = attribute_path(v);
      if (makes_fresh_tensor(n) || (path && !path->empty()) || n == view_.graph->param_node()) {
        origins.insert(v);
        return true;
      }
    }
    if (n->kind() == prim::unchecked_cast || n->kind() == prim::ListUnpack)
      return collect_origins(n->input(0), origins);
    if (n->kind() == prim::ListConstruct)
      return std::all_of(n->inputs().begin(), n->inputs().end(), [&](Value* x) { return collect_origins(x, origins); });
    if (n->kind() == prim::TupleUnpack) return collect_origins_in_tuple(n->input(0), v->offset(), origins);
    return gives_part_of_first(n) && collect_origins(n->input(0), origins);
  }

  bool collect_origins_in_tuple(Value* tuple, size_t element, ValueSet& origins) {
    Node* n = tuple->node();
    if (n->kind() == prim::TupleConstruct) return collect_origins(n->input(element), origins);
    if (n->kind() != prim::If) return false;
    return std::all_of(n->blocks().begin(), n->blocks().end(), [&](Block* b) {
      return collect_origins_in_tuple(b->outputs()[tuple->offset()], element, origins);
    });
  }

  // Whether nothing adds to a list, or puts it elsewhere.
  static bool is_unpacked_only(const Value* list) {
    return std::all_of(list->uses().begin(), list->uses().end(), [](const Use& use) {
      return use.user->kind() == prim::ListUnpack ||
             (use.user->kind() == prim::Return && use.user->owningBlock()->owningNode() &&
              use.user->owningBlock()->owningNode()->kind() == prim::If);
    });
  }

  // Whether the results are the first argument or views of it, by the schema, and of nothing else.
  static bool gives_part_of_first(const Node* n) {
    const FunctionSchema* schema = n->maybeSchema();
    if (!schema || !n->kind().is_aten() || may_give_its_argument(n) || schema->returns().size() != 1 ||
        !schema->returns()[0].alias_info())
      return false;
    const auto& arguments = schema->arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if ((arguments[i].alias_info() != nullptr) != (i == 0)) return false;
    return true;
  }

  bool share_an_origin(const ValueSet& x, const ValueSet& y) {
    const auto same = [&](const Value* a, const Value* b) {
      if (a == b) return true;
      if (makes_fresh_tensor(a->node()) && makes_fresh_tensor(b->node())) return false;
      if (makes_fresh_tensor(a->node()) || makes_fresh_tensor(b->node())) return sets_attributes_;
      const auto path_a = attribute_path(a), path_b = attribute_path(b);
      const bool attributes = path_a && path_b && !path_a->empty() && !path_b->empty();
      return !attributes || attributes_.alias(*path_a, *path_b);
    };
    return std::any_of(x.begin(), x.end(), [&](const Value* a) {
      return std::any_of(y.begin(), y.end(), [&](const Value* b) { return same(a, b); });
    });
  }

  // The first value of a chain of in-place operators.
  Value* root(Value* v) {
    while (true) {
      auto op = ops_.find(v->node());
      if (op == ops_.end() || !op->second.in_place) return v;
      v = v->node()->input(0);
    }
  }
};

}  // namespace

MatchResult find_matches(const View& view, const std::vector<const Pattern*>& patterns, const Attributes& attributes) {
  return Matcher(view, patterns, attributes).run();
}

}  // namespace tsmem
