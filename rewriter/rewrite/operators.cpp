#include "rewriter/rewrite/operators.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>

#include "rewriter/method_call.h"
#include "rewriter/patterns/pattern_lines.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// Whether n works on a counter (num_batches_tracked) or a table of integers: nothing of these is saved for backward.
bool counts(const Node* n, const Attributes& attributes) {
  const auto path = n->inputs().empty() ? std::nullopt : attribute_path(n->input(0));
  return path && !path->empty() && attributes.integral(*path);
}

class Collector {
 public:
  Operators found;
  explicit Collector(const Attributes& attributes) : attributes_(attributes) { found.set_attributes = attributes.set; }

  // Scripted autocast is lowered by a pass over aten ops between Enter and Exit: ours would miss its casts.
  // Under no_grad nothing is saved; and whether TorchScript takes a result there for one that needs a gradient depends
  // on which operators it finds there.
  void collect(Block* block, int autocast, int no_grad) {
    std::vector<int> around;
    for (Node* n : block->nodes()) {
      if (n->kind() == prim::SetAttr && may_hold_tensor(n->input(1)->type()))
        found.set_attributes.insert(n->s(attr::name));
      if (borders_autocast(n)) autocast += n->kind() == prim::Enter ? 1 : -1;
      if (autocast > 0) found.in_autocast.insert(n);
      if (borders_no_grad(n)) no_grad += n->kind() == prim::Enter ? 1 : -1;
      if (no_grad > 0) found.in_no_grad.insert(n);
      if (n->kind() == prim::Enter) {
        around.push_back(with_block_);
        with_block_ = ++last_with_block_;
      } else if (n->kind() == prim::Exit && !around.empty()) {
        with_block_ = around.back();
        around.pop_back();
      } else if (n->kind() == Symbol::fromQualString("aten::set_grad_enabled")) {
        with_block_ = ++last_with_block_;
      }
      found.with_blocks[n] = with_block_;
      CanonicalOp op = canonical(n);
      if (!op.name.empty() && !counts(n, attributes_)) {
        found.by_name[op.name].push_back(n);
        if (by_traced_number(op)) found.by_name[op.name + "_number"].push_back(n);
        found.canonical.emplace(n, std::move(op));
      }
      for (Block* b : n->blocks()) collect(b, autocast, no_grad);
    }
  }

 private:
  const Attributes& attributes_;
  int with_block_ = 0, last_with_block_ = 0;
};

}  // namespace

bool may_hold_tensor(const TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::IntType:
    case TypeKind::FloatType:
    case TypeKind::ComplexType:
    case TypeKind::BoolType:
    case TypeKind::NumberType:
    case TypeKind::StringType:
    case TypeKind::NoneType:
    case TypeKind::DeviceObjType:
      return false;
    case TypeKind::ListType:
    case TypeKind::DictType:
    case TypeKind::TupleType:
    case TypeKind::OptionalType: {
      const auto inner = type->containedTypes();
      return std::any_of(inner.begin(), inner.end(), may_hold_tensor);
    }
    default:
      return true;
  }
}

Operators collect_operators(const View& view, const Attributes& attributes) {
  Collector collector(attributes);
  collector.collect(view.graph->block(), 0, 0);
  return std::move(collector.found);
}

bool runs_unseen(const Node* n) {
  return n->kind() == prim::CallMethod || n->kind() == prim::CallFunction || n->kind() == prim::fork ||
         n->kind() == prim::awaitable;
}

std::vector<Value*> given_unseen(Node* n) {
  std::vector<Value*> given;
  // A method that runs again as a whole overwrites none of its arguments (checkpoint.h).
  if (!runs_unseen(n) || called_method(n) || called_function(n)) return given;
  for (Value* v : n->inputs()) {
    const auto kind = v->type()->kind();
    const bool object = kind == TypeKind::ClassType || kind == TypeKind::InterfaceType;
    if (!object && kind != TypeKind::FunctionType && may_hold_tensor(v->type())) given.push_back(v);
  }
  return given;
}

bool by_traced_number(const CanonicalOp& op) { return commutes(op.name) && traced_number(op.inputs[1]).has_value(); }

std::optional<c10::IValue> traced_number(const Value* v) {
  const std::optional<c10::IValue> c = toIValue(v);
  if (!c || !c->isTensor() || !c->toTensor().defined() || c->toTensor().dim() != 0 || !c->toTensor().is_cpu())
    return std::nullopt;
  return c10::IValue(c->toTensor().item());
}

std::string name_of(const View& view, const Node* n) {
  const auto place = view.places.find(n);
  const std::string path = place == view.places.end() ? "" : module_path_of(place->second);
  return path.empty() ? n->kind().toQualString() : fmt::format("{} ({})", path, n->kind().toQualString());
}

bool may_be_tensor(const Value* v) {
  return v->type()->isSubtypeOf(*OptionalType::ofTensor()) && v->type()->kind() != NoneType::Kind;
}

}  // namespace tsmem
