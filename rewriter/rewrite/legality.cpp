#include "rewriter/rewrite/legality.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/rewrite/apply.h"
#include "rewriter/rewrite/order.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// An input of the match, an inner value or a result.
Value* value_of(const CompiledRule& rule, const Attempt& a, const std::string& name) {
  const auto made = rule.defined_by.find(name);
  if (made == rule.defined_by.end()) return a.bound.at(name);
  const auto& outs = rule.lines[made->second].outputs;
  return a.nodes[made->second]->output(std::find(outs.begin(), outs.end(), name) - outs.begin());
}

// A dropout with p = 0, or in evaluation. What overwrites its result may be what a view must not be given to, or what
// backward needs of the operator before.
bool gives_its_input(const Node* n) {
  if (!is_dropout(n->kind())) return false;
  const auto p = toIValue(n->input(1)), train = toIValue(n->input(2));
  return (p && p->isDouble() && p->toDouble() == 0) || !(train && train->isBool() && train->toBool());
}

// Whether v, or a view of it, is overwritten.
bool overwritten(const Value* v) {
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

// Whether the op that is put for one that overwrites its first argument is told so, or needs not be.
bool knows_in_place(const CompiledRule& rule, const CanonicalOp& op) {
  return op.name == "act" || is_dropout(Symbol::aten(op.name)) ||
         takes(rewrite_lines(rule.rule->rewrite).front().op, "in_place");
}

// Why an op of the rewrite takes none of the bound values in some place: padding="same" where a list belongs.
std::string takes_none(const CompiledRule& rule, const Attempt& a) {
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

// Whether a branch has v among its results twice, and both are used.
bool given_out_twice(const Value* v, const Node* returns) {
  const Node* branches = returns->owningBlock()->owningNode();
  size_t used = 0;
  for (size_t i = 0; i < returns->inputs().size(); ++i)
    used += returns->input(i) == v && branches->output(i)->hasUses();
  return used > 1;
}

// Whether v, which is overwritten, may be a view, and not dense: the result of an in-place operator has its strides.
bool may_be_part(const Value* v) {
  const Node* n = v->node();
  if (n->kind() == prim::If)
    return std::any_of(n->blocks().begin(), n->blocks().end(),
                       [&](const Block* b) { return may_be_part(b->outputs()[v->offset()]); });
  const FunctionSchema* schema = n->maybeSchema();
  if (is_dropout(n->kind()) || (schema && schema->is_mutable())) return may_be_part(n->input(0));
  return gives_part_of_first(n);
}

// A tensor, or those of a list that is made here.
std::vector<Value*> tensors_of(Value* v) {
  if (may_be_tensor(v)) return {v};
  const bool tensors = v->node()->kind() == prim::ListConstruct && v->type()->isSubtypeOf(*ListType::ofTensors());
  return tensors ? v->node()->inputs().vec() : std::vector<Value*>{};
}

bool is_result(const Value* v, const Attempt& a) {
  return std::find(a.nodes.begin(), a.nodes.end(), v->node()) != a.nodes.end();
}

}  // namespace

bool gives_overwritten_input(const Node* n) { return gives_its_input(n) && overwritten(n->output()); }

std::string overwritten_input(const std::string& name) {
  return fmt::format("where {} drops nothing, its result is its argument, and it is overwritten", name);
}

std::string Legality::refusal(const CompiledRule& rule, const Attempt& a) const {
  for (size_t i = 0; i < a.nodes.size(); ++i) {
    if (!a.ops[i].trouble.empty()) return fmt::format("{}: {}", name_of(a.nodes[i]), a.ops[i].trouble);
    if (operators_.in_autocast.count(a.nodes[i]))
      return fmt::format("{} is inside an autocast block of the model's own code", name_of(a.nodes[i]));
    if (operators_.in_no_grad.count(a.nodes[i]))
      return fmt::format("{} is inside a no_grad block, where nothing is saved", name_of(a.nodes[i]));
  }
  Node* anchor = a.nodes.back();
  for (Node* n : a.nodes)
    if (view_.unused.count(n) || runs_for_its_effect(n))
      return fmt::format("nothing uses the result of {}", name_of(n));
  for (Node* n : a.nodes)
    if (n->owningBlock() != anchor->owningBlock())
      return fmt::format("{} and {} are not in the same branch or loop", name_of(n), name_of(anchor));
  for (size_t i = 0; i + 1 < a.nodes.size(); ++i)
    for (size_t k = 0; k < a.nodes[i]->outputs().size(); ++k)
      if (auto reason = escapes(rule, a, i, k); !reason.empty()) return reason;
  if (auto reason = reads_inner_value(rule, a); !reason.empty()) return reason;
  for (size_t k = rule.lines.back().outputs.size(); k < anchor->outputs().size(); ++k)
    if (anchor->output(k)->hasUses()) return fmt::format("another result of {} (its indices) is used", name_of(anchor));
  if (a.nodes.size() == 1 && a.ops[0].in_place && !knows_in_place(rule, a.ops[0]))
    return fmt::format("{} overwrites its first argument, and there is no operator here that does", name_of(anchor));
  for (size_t i = 0; i < a.nodes.size(); ++i)
    if (a.ops[i].in_place && is_dropout(Symbol::aten(a.ops[i].name)) && may_be_part(a.nodes[i]->input(0)))
      return fmt::format("{} overwrites a view, whose strides its result has", name_of(a.nodes[i]));
  for (size_t i = 0; i < a.nodes.size(); ++i)
    if (a.ops[i].in_place)
      if (auto reason = seen_after(a.nodes[i]->input(0), a.nodes[i], a.nodes[i]); !reason.empty()) return reason;
  // TorchScript's own derivative of aten::dropout makes a tensor: find.cpp tells which have that.
  if (anchor->kind() != aten::dropout && gives_overwritten_input(anchor)) return overwritten_input(name_of(anchor));
  if (auto reason = takes_none(rule, a); !reason.empty()) return reason;
  for (const std::string& name : rule.rule->intact) {
    Attempt kept = a;
    kept.bound = {{name, value_of(rule, a, name)}};
    if (auto reason = written_later(kept); !reason.empty()) return reason;
  }
  // TorchScript knows of aten::cat and a few others that the tensors of a list stay as they are. It takes any other
  // operator with a list for one through which these are seen later, and then what overwrites them runs.
  for (const auto& [name, value] : a.bound)
    if (!may_be_tensor(value))
      if (auto reason = written_by_dead_code(value); !reason.empty()) return reason;
  return disturbed(a);
}

// An inner value that something outside the match reads.
std::string Legality::escapes(const CompiledRule& rule, const Attempt& a, size_t i, size_t k) const {
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
std::string Legality::reads_inner_value(const CompiledRule& rule, const Attempt& a) const {
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

// Why the memory of v, which n overwrites, may be read by others when n has run; empty: then n may as well write
// elsewhere. `user` is the user of v that leads to n.
std::string Legality::seen_after(Value* v, Node* user, Node* n) const {
  Node* producer = v->node();
  auto op = operators_.canonical.find(producer);
  const bool chained = op != operators_.canonical.end() && op->second.in_place;
  const bool branches = producer->kind() == prim::If,
             part = !chained && (gives_part_of_first(producer) || is_dropout(producer->kind()));
  if (!chained && !branches && !part && !makes_fresh_tensor(producer))
    return fmt::format("{} overwrites a tensor that may be seen from elsewhere", name_of(n));
  if (!in_branches_of(n, producer->owningBlock()) && !exits_into(producer, n))
    return fmt::format("{} overwrites a tensor made outside its loop", name_of(n));
  // Under no_grad the original's result is still the tensor with its history; a new tensor would have none.
  if (operators_.with_blocks.at(producer) != operators_.with_blocks.at(n))
    return fmt::format("{} overwrites a tensor made outside its `with` block", name_of(n));
  if (user->kind() == prim::Return && given_out_twice(v, user))
    return fmt::format("{} overwrites a tensor that its branch gives out twice", name_of(n));
  for (const Use& use : v->uses()) {
    if (use.user == user || exclusive(use.user, user) || exclusive(use.user, n)) continue;
    if (!runs_before(use.user, n) || !only_reads(use.user))
      return fmt::format("{} overwrites a tensor that {} uses too", name_of(n),
                         use.user->kind() == prim::Return ? "its caller" : name_of(use.user));
  }
  if (chained || part) return seen_after(producer->input(0), producer, n);
  if (branches)
    for (Block* b : producer->blocks())
      if (auto reason = seen_after(b->outputs()[v->offset()], b->return_node(), n); !reason.empty()) return reason;
  return "";
}

// Whether dead code writes to a tensor, or to those of a list. TorchScript leaves that code out of the original.
std::string Legality::written_by_dead_code(Value* value) const {
  for (Value* written : view_.overwritten_unused)
    for (Value* v : tensors_of(value))
      if (sharing_.may_alias(written, v)) return "something whose result is not used writes to an input of the match";
  return "";
}

// Whether something that may run after the match writes to what it keeps: what follows, all of a loop around it, and
// dead code, wherever it stood.
std::string Legality::written_later(const Attempt& kept) const {
  for (const auto& [name, value] : kept.bound)
    if (auto reason = written_by_dead_code(value); !reason.empty()) return reason;
  for (Node* n = kept.nodes.back(); n; n = n->owningBlock()->owningNode()) {
    for (Node* later = n->next(); later != n->owningBlock()->return_node(); later = later->next())
      if (auto reason = writes(later, kept, /*in_between=*/false); !reason.empty()) return reason;
    if (n->kind() == prim::Loop)
      if (auto reason = writes(n, kept, /*in_between=*/false); !reason.empty()) return reason;
  }
  return "";
}

// The new op reads all its inputs where the last matched node stood: nothing in between may write to them, nor dead
// code, which may have stood there.
std::string Legality::disturbed(const Attempt& a) const {
  if (a.nodes.size() > 1)
    for (const auto& [name, value] : a.bound)
      if (!is_result(value, a))
        if (auto reason = written_by_dead_code(value); !reason.empty()) return reason;
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
std::string Legality::writes(Node* n, const Attempt& a, bool in_between) const {
  if (in_between && (n->kind() == prim::Enter || n->kind() == prim::Exit))
    return "a `with` block begins or ends between the matched operators";
  if (runs_unseen(n)) {
    const std::string name = n->kind() == prim::CallMethod     ? n->s(attr::name)
                             : n->kind() == prim::CallFunction ? "function"
                                                               : n->kind().toUnqualString();
    if (in_between)
      return fmt::format("a call that can't be looked into ({}) lies between the matched operators", name);
    for (Value* given : given_unseen(n))
      for (const auto& [_, bound] : a.bound)
        for (Value* v : tensors_of(bound))
          if (!is_result(v, a) && sharing_.may_alias(given, v))
            return fmt::format("a call that can't be looked into ({}) may write to an input of the match later", name);
  }
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
    const bool statistics = norm && (k == 3 || k == 4) && may_be_tensor(n->input(k));
    if (!statistics && !(alias && alias->isWrite())) continue;
    // What goes into a list or a dictionary, or leaves it, changes that and no tensor's memory; where a schema says
    // Tensor[], as that of _foreach_add_ does, the tensors are meant.
    const bool container =
        !may_be_tensor(n->input(k)) && !schema->arguments()[k].type()->isSubtypeOf(*ListType::ofTensors());
    for (const auto& [name, bound] : a.bound)
      for (Value* v : container ? std::vector<Value*>{bound} : tensors_of(bound))
        if (v->node() != n && (!statistics || sharing_.may_be_attribute(v)) &&
            (container ? sharing_.same_container(n->input(k), v) : sharing_.may_alias(n->input(k), v)))
          return fmt::format("{} writes to {} of the match {}", name_of(n), is_result(v, a) ? "a result" : "an input",
                             in_between ? "in between" : "later");
  }
  return "";
}

}  // namespace tsmem
