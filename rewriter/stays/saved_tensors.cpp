#include "rewriter/stays/saved_tensors.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "ops/act_table.h"
#include "ops/recompute_argument.h"
#include "ops/traits.h"
#include "rewriter/method_call.h"
#include "rewriter/modules.h"
#include "rewriter/stays/saved_by.h"

namespace tsmem {

using namespace torch::jit;

namespace {

std::string parent_path(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

bool within(const std::string& path, const std::string& outer) {
  return outer.empty() || path == outer || path.starts_with(outer + ".");
}

bool is_ours(const Node* n) { return n->kind().ns().toUnqualString() == std::string("tsmem"); }

// Whether a value may hold tensors: one, or a list, tuple or dictionary of some.
bool holds_tensors(const c10::TypePtr& type) {
  if (type->isSubtypeOf(*TensorType::get())) return true;
  const auto inner = type->containedTypes();
  return type->kind() == TypeKind::AnyType ||
         std::any_of(inner.begin(), inner.end(), [](const auto& t) { return holds_tensors(t); });
}

// Its result is memory of an argument, which it may have overwritten, or a list of such.
bool gives_argument(const Node* n, size_t output, size_t& argument) {
  const FunctionSchema* schema = n->maybeSchema();
  if (!schema || output >= schema->returns().size()) return false;
  const c10::AliasInfo* result = schema->returns()[output].alias_info();
  if (!result) return false;
  if (!result->containedTypes().empty()) result = &result->containedTypes()[0];  // unbind's list of views
  for (argument = 0; argument < schema->arguments().size() && argument < n->inputs().size(); ++argument)
    if (const c10::AliasInfo* a = schema->arguments()[argument].alias_info();
        a && a->beforeSets() == result->beforeSets())
      return true;
  return false;
}

class GraphAccount {
 public:
  GraphAccount(const Module& module, const View& view) : module_(module), view_(view) {
    inputs_need_grad_ = !trains(module);
    // Twice: what a loop's body makes goes into its next round.
    for (const bool last : {false, true}) {
      needs_grad_anything_ = last;
      visit(view.graph->block());
    }
  }

  std::vector<SavedTensor> tensors;

 private:
  const Module& module_;
  const View& view_;
  bool inputs_need_grad_ = false, needs_grad_anything_ = false;
  int no_grad_ = 0;
  std::unordered_map<const Value*, bool> needs_grad_;
  std::unordered_set<const Value*> known_;  // counted already
  std::unordered_map<const Value*, std::unordered_set<const Value*>> made_;

  std::string module_of(const Node* n) const {
    const auto place = view_.places.find(n);
    std::string path = place == view_.places.end() ? "" : module_path_of(place->second);
    if (const auto own = module_of_parameters(n); own && (within(*own, path) || path.empty())) path = *own;
    return path;
  }

  bool needs_grad(const Value* v) {
    if (const auto known = needs_grad_.find(v); known != needs_grad_.end()) return known->second;
    const Node* n = v->node();
    if (n->kind() == prim::GetAttr && v->type()->isSubtypeOf(*TensorType::get())) {
      const auto path = attribute_path(v);
      const at::Tensor t = path ? attribute(module_, *path) : at::Tensor();
      return needs_grad_[v] = t.defined() ? t.requires_grad() : !path;
    }
    if (n->kind() == prim::Param && n->owningBlock() == view_.graph->block())
      return inputs_need_grad_ && holds_tensors(v->type());
    return false;
  }

  bool any_needs_grad(at::ArrayRef<const Value*> values) {
    return std::any_of(values.begin(), values.end(), [&](const Value* v) { return needs_grad(v); });
  }

  void visit(const Block* block) {
    for (const Node* n : const_cast<Block*>(block)->nodes()) {
      if (borders_no_grad(n)) no_grad_ += n->kind() == prim::Enter ? 1 : -1;
      bool needs = any_needs_grad(n->inputs());
      for (const Block* inner : n->blocks()) {
        // A loop's values go round: those of its body are the ones that it began with or those that it made.
        for (const Value* in : inner->inputs()) needs_grad_[in] = needs_grad_[in] || needs;
        visit(inner);
        needs |= any_needs_grad(inner->outputs());
      }
      if (no_grad_ > 0 || never_needs_gradient(n->kind().toQualString())) needs = false;
      if (n->kind() == prim::GetAttr) continue;  // says so of itself
      for (const Value* out : n->outputs()) needs_grad_[out] = needs && holds_tensors(out->type());
      if (needs && n->kind() == aten::append) needs_grad_[n->input(0)] = true;
      if (needs && needs_grad_anything_) add(n);
    }
  }

  // What the operator keeps.
  void add(const Node* n) {
    const std::string op = n->kind().toQualString();
    size_t argument = 0;
    if (n->kind().is_prim() && n->kind() != prim::CallMethod && n->kind() != prim::CallFunction) return;
    if (n->outputs().empty() || !holds_tensors(n->output(0)->type())) return;
    auto saved = saved_by(op);
    if (!saved) {
      const FunctionSchema* schema = n->maybeSchema();
      const bool is_view = schema && gives_argument(n, 0, argument);
      const bool is_container = n->kind() == aten::__getitem__ || n->kind() == aten::append || n->kind() == aten::list;
      if (!is_view && !is_container) tensors.push_back({op, module_of(n), op, module_of(n), {}, true});
      return;
    }
    if (op == "tsmem::act") saved = of_activation(n);
    if (saved->internals) tensors.push_back({op, module_of(n), op, module_of(n), {}});
    const FunctionSchema* schema = n->maybeSchema();
    for (size_t i = 0; schema && i < schema->arguments().size() && i < n->inputs().size(); ++i) {
      const std::string& name = schema->arguments()[i].name();
      bool keeps = saved->all_arguments && holds_tensors(n->input(i)->type());
      for (const SavedBy::Part& part : saved->parts) keeps |= part.argument == name && asked_for(n, part);
      if (keeps) need(n->input(i), n);
    }
    for (const SavedBy::Part& part : saved->parts)
      if (part.argument == "result" && asked_for(n, part)) need(n->output(0), n);
  }

  static SavedBy of_activation(const Node* n) {
    SavedBy saved;
    const auto name = toIValue(n->input(1));
    for (const ActInfo& info : kActivations) {
      if (!name || !name->isString() || name->toStringRef() != info.name) continue;
      saved.internals = info.saves == ActSaves::bit;
      if (info.saves == ActSaves::input) saved.parts.push_back({"self", ""});
      if (info.saves == ActSaves::output) saved.parts.push_back({"result", ""});
    }
    return saved;
  }

  bool asked_for(const Node* n, const SavedBy::Part& part) {
    if (part.gradient_of.empty()) return true;
    const FunctionSchema* schema = n->maybeSchema();
    for (size_t i = 0; i < schema->arguments().size() && i < n->inputs().size(); ++i)
      if (schema->arguments()[i].name() == part.gradient_of) return needs_grad(n->input(i));
    return false;
  }

  // An attribute that is a flag of the model's own ("use_res_connect"), which decides what its code does.
  std::optional<bool> flag(const Value* v) const {
    const auto path = attribute_path(v);
    if (!path || path->ends_with("training")) return std::nullopt;
    const Module owner = submodule(module_, parent_path(*path));
    const std::string name = path->substr(path->rfind('.') + 1);
    if (!owner.hasattr(name) || !owner.attr(name).isBool()) return std::nullopt;
    return owner.attr(name).toBool();
  }

  // The values whose memory v is, or may hold.
  const std::unordered_set<const Value*>& made(const Value* v) {
    const auto known = made_.find(v);
    if (known != made_.end()) return known->second;
    made_[v];  // a loop's values go round
    std::unordered_set<const Value*> from;
    const auto add_of = [&](const Value* of) { from.insert(made(of).begin(), made(of).end()); };
    const Node* n = v->node();
    size_t argument = 0;
    if (n->kind() == prim::Param && n->owningBlock()->owningNode()) {
      const Node* loop = n->owningBlock()->owningNode();
      if (loop->kind() == prim::Loop && v->offset() > 0) {
        add_of(loop->input(v->offset() + 1));
        add_of(n->owningBlock()->outputs()[v->offset()]);
      }
    } else if (n->kind() == prim::If) {
      const auto taken = flag(n->input());
      for (size_t b = 0; b < n->blocks().size(); ++b)
        if (!taken || *taken == (b == 0)) add_of(n->blocks()[b]->outputs()[v->offset()]);
    } else if (n->kind() == prim::Loop) {
      add_of(n->input(v->offset() + 2));
      add_of(n->blocks()[0]->outputs()[v->offset() + 1]);
    } else if (n->kind() == prim::GetAttr || n->kind() == prim::Constant || n->kind() == prim::Param) {
    } else if ((n->kind().is_prim() && n->kind() != prim::CallMethod && n->kind() != prim::CallFunction) ||
               n->kind() == aten::__getitem__) {
      for (const Value* in : n->inputs())
        if (holds_tensors(in->type())) add_of(in);
      for (const Use& use : v->uses())
        if (use.user->kind() == aten::append && use.offset == 0) add_of(use.user->input(1));
    } else if (gives_argument(n, v->offset(), argument)) {
      add_of(n->input(argument));
    } else {
      from.insert(v);
    }
    return made_[v] = from;
  }

  // Backward of `keeper` needs v.
  void need(const Value* v, const Node* keeper) {
    const auto values = made(v);
    for (const Value* value : values) {
      const Node* maker = value->node();
      if (is_ours(keeper) && recomputed(maker)) {
        if (!known_.insert(value).second) continue;
        for (const Value* in : maker->inputs())
          if (holds_tensors(in->type())) need(in, keeper);
      } else if (!counted_.count(value)) {
        counted_.insert(value);
        tensors.push_back(
            {maker->kind().toQualString(), module_of(maker), keeper->kind().toQualString(), module_of(keeper), {}});
      }
    }
  }

  at::Tensor weight_of(const Node* n) const {
    const auto index = n->schema().argumentIndexWithName("weight");
    const Value* v = index ? n->input(*index) : nullptr;
    const auto path = v && v->node()->kind() == prim::GetAttr ? attribute_path(v) : std::nullopt;
    return path ? attribute(module_, *path) : at::Tensor();
  }

  // The product of a list of constant ints.
  static std::optional<double> product_of(const Value* list) {
    double product = 1;
    if (const auto constant = toIValue(list)) {
      for (const int64_t i : constant->toIntVector()) product *= static_cast<double>(i);
      return product;
    }
    if (list->node()->kind() != prim::ListConstruct) return std::nullopt;
    for (const Value* v : list->node()->inputs()) {
      const auto i = toIValue(v);
      if (!i) return std::nullopt;
      product *= static_cast<double>(i->toInt());
    }
    return product;
  }

  // A convolution's or linear layer's work for an element of its output, as is_cheap_layer() takes it, and how much
  // larger its output is than its input, without what padding adds; nothing where that can't be told.
  struct Work {
    double operations;
    double growth;
  };

  std::optional<Work> work_of(const Node* n) const {
    const at::Tensor weight = weight_of(n);
    const auto constant = [&](const char* name) -> std::optional<c10::IValue> {
      const auto index = n->schema().argumentIndexWithName(name);
      return index ? toIValue(n->input(*index)) : std::nullopt;
    };
    if (!weight.defined() || weight.dim() < 2 || weight.numel() == 0) return std::nullopt;
    const auto all = 2 * static_cast<double>(weight.numel());
    const auto first = static_cast<double>(weight.size(0));
    if (!n->schema().argumentIndexWithName("stride"))
      return Work{all / first, first / static_cast<double>(weight.size(1))};
    const auto steps = product_of(n->input(*n->schema().argumentIndexWithName("stride")));
    const auto groups = constant("groups");
    if (!steps || !groups) return std::nullopt;
    const auto second = static_cast<double>(weight.size(1) * groups->toInt());
    const bool grouped = groups->toInt() > 1;
    const auto transposed = constant("transposed");
    if (transposed ? !transposed->toBool() : !n->schema().argumentIndexWithName("output_padding"))
      return Work{as_in_a_product(all / first, grouped && weight.size(1) == 1), first / second / *steps};
    return Work{as_in_a_product(all / second / *steps, grouped && weight.size(0) == groups->toInt()),
                second * *steps / first};
  }

  // The operations, for an element of v, of the layers that run again for it.
  double layers_of(const Value* v) {
    if (const auto known = layers_.find(v); known != layers_.end()) return known->second;
    layers_[v] = 0;  // a loop's values go round
    double most = 0;
    for (const Value* value : made(v)) {
      const Node* maker = value->node();
      if (!recomputed(maker)) continue;
      const auto work = traits_of(maker->kind().toQualString()).may_be_cheap ? work_of(maker) : std::nullopt;
      double all = work ? work->operations : 0;
      for (const Value* in : maker->inputs())
        if (holds_tensors(in->type())) all += layers_of(in) / (work ? work->growth : 1);
      most = std::max(most, all);
    }
    return layers_[v] = most;
  }

  bool made_again(const Value* v) {
    const auto values = made(v);
    return !values.empty() &&
           std::all_of(values.begin(), values.end(), [&](const Value* value) { return recomputed(value->node()); });
  }

  bool is_leaf(const Value* v) const {
    if (v->node()->kind() == prim::Param && v->node()->owningBlock() == view_.graph->block()) return true;
    const auto needs = needs_grad_.find(v);
    return needs == needs_grad_.end() || !needs->second;
  }

  // Whether v is made of whole maps' means alone, as a squeeze-and-excitation's scale is: so small that it is kept.
  bool is_of_means(const Value* v) {
    if (const auto known = of_means_.find(v); known != of_means_.end()) return known->second;
    of_means_[v] = false;  // a loop's values go round
    const auto values = made(v);
    const bool all = !values.empty() && std::all_of(values.begin(), values.end(), [&](const Value* value) {
      const Node* maker = value->node();
      const std::string op = maker->kind().toUnqualString();
      if (op == "mean" || op.starts_with("adaptive_avg_pool")) return true;
      bool any = false;
      for (const Value* in : maker->inputs()) {
        if (!holds_tensors(in->type()) || made(in).empty()) continue;
        if (!is_of_means(in)) return false;
        any = true;
      }
      return any;
    });
    return of_means_[v] = all;
  }

  // As as_cheap_layer() in ops/recompute.cpp decides when it runs. Not attention: graphs have no sizes.
  bool is_cheap(const Node* n) {
    if (const auto known = cheap_.find(n); known != cheap_.end()) return known->second;
    const auto work = work_of(n);
    const Value* input = n->input(0);
    const bool keeps_input = work && (weight_of(n).requires_grad() || made_again(input));
    const bool cheap = keeps_input && !is_of_means(input) && is_cheap_layer(work->operations) &&
                       (is_leaf(input) || work->growth >= 1) &&
                       is_cheap_after(layers_of(input) / work->growth, work->operations);
    return cheap_[n] = cheap;
  }

  // Whether backward makes the operator's output again.
  bool recomputed(const Node* n) {
    const FunctionSchema* schema = n->maybeSchema();
    if (!is_ours(n) || !schema) return false;
    const auto index = schema->argumentIndexWithName("recompute");
    if (!index || static_cast<size_t>(*index) >= n->inputs().size()) return false;
    const Value* argument = n->input(*index);
    if (const auto constant = toIValue(argument)) {
      const RecomputeArgument recompute = constant->toInt();
      return recompute.recomputes() && (recompute.how != Recompute::if_cheap || is_cheap(n));
    }
    const auto path = attribute_path(argument);
    if (!path) return false;
    const Module owner = submodule(module_, parent_path(*path));
    const std::string name = path->substr(path->rfind('.') + 1);
    return owner.hasattr(name) && owner.attr(name).isInt() && RecomputeArgument(owner.attr(name).toInt()).recomputes();
  }

  std::unordered_set<const Value*> counted_;
  std::unordered_map<const Value*, double> layers_;
  std::unordered_map<const Value*, bool> of_means_;
  std::unordered_map<const Node*, bool> cheap_;
};

}  // namespace

std::vector<SavedTensor> saved_tensors(const Module& module, const Graph& method, const BodyOf& body_of) {
  Scopes scopes;
  View view = copy_graph(
      method, scopes, [](const Scope*) { return true; }, body_of);
  remove_dead_code(view, UnusedNorms::go);
  return GraphAccount(module, view).tensors;
}

bool trains(const Module& module) {
  for (const at::Tensor& p : module.parameters())
    if (p.requires_grad()) return true;
  return false;
}

std::optional<std::string> module_of_parameters(const Node* n) {
  std::optional<std::string> common;
  for (const Value* in : n->inputs()) {
    if (in->node()->kind() != prim::GetAttr || !in->type()->isSubtypeOf(*TensorType::get())) continue;
    const auto path = attribute_path(in);
    if (!path) continue;
    std::string of = parent_path(*path);
    if (common)
      while (!within(of, *common)) common = parent_path(*common);
    else
      common = of;
  }
  return common;
}

}  // namespace tsmem
