#include "rewriter/graph/import_exported.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <limits>
#include <set>

#include "rewriter/error.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/for_torchscript.h"
#include "rewriter/graph/mode_blocks.h"
#include "rewriter/graph/module_stack.h"
#include "rewriter/graph/origin.h"
#include "rewriter/graph/outline.h"
#include "rewriter/graph/tensor_values.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;
using nlohmann::json;

namespace {

// The position of an operator's argument, of one of the names; -1 where it has none.
int argument_at(const Node* n, std::initializer_list<const char*> names) {
  const FunctionSchema* schema = is_opaque(n) ? nullptr : n->maybeSchema();
  if (!schema) return -1;
  for (size_t i = 0; i < schema->arguments().size(); ++i)
    for (const char* name : names)
      if (schema->arguments()[i].name() == name) return static_cast<int>(i);
  return -1;
}

// The module whose flag an operator asks: that of a norm's running statistics, else the one whose code it is. (A
// rewritten norm and its activation are one operator.)
std::string mode_path(const Node* n) {
  if (const int at = argument_at(n, {"running_mean"}); at >= 0)
    if (const Node* read = n->input(at)->node(); read->kind() == prim::GetAttr)
      return attribute_path(read->input()).value_or(module_path(n));
  return module_path(n);
}

bool is_norm(const Node* n) { return argument_at(n, {"running_mean"}) >= 0; }

// Where the operator takes the mode that its module is in; -1 where it takes none.
int mode_at(const Node* n) {
  const int at = argument_at(n, {"training", "train", "use_input_stats"});
  if (at < 0 || n->input(at)->type()->kind() != TypeKind::BoolType) return -1;
  // Without running statistics a norm uses the batch's in eval mode too.
  const int statistics = argument_at(n, {"running_mean"});
  return statistics >= 0 && n->input(statistics)->mustBeNone() ? -1 : at;
}

bool draws(const Node* n) {
  const FunctionSchema* schema = is_opaque(n) ? nullptr : n->maybeSchema();
  if (!schema) return false;
  const auto handle = c10::Dispatcher::singleton().findSchema({schema->name(), schema->overload_name()});
  return handle && handle->hasTag(at::Tag::nondeterministic_seeded);
}

// "1 batch norm", "3 batch norms".
std::string counted(size_t n, const std::string& noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

// The first few of many.
std::string listed(const std::set<std::string>& all) {
  constexpr size_t kShown = 3;
  std::vector<std::string> shown(all.begin(), std::next(all.begin(), std::min(all.size(), kShown)));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (all.size() > kShown) text += fmt::format(" and {} more", all.size() - kShown);
  return text;
}

std::string where(const Node* n) {
  const std::string path = mode_path(n);
  return fmt::format("{}{}", n->kind().toUnqualString(), path.empty() ? "" : " in " + path);
}

class Importer {
 public:
  explicit Importer(const ExportedProgram& program)
      : program_(program.program),
        casts_unknown_(program.casts_unknown),
        path_(program.path),
        module_(module_with_blocks(program, c10::kCPU, RunBy::torchscript)),
        body_(function_graph(module_.type()->findMethod("forward"))) {}

  Imported run() {
    refuse_opaque();
    add_modules();
    find_flags();
    for (Node* n : nodes()) give_flag(n);
    for (Node* n : nodes()) count_batches_in_training(n);
    for (Node* n : nodes()) let_cudnn_run(n);
    leave_out_assertions();
    describe_what_stays();
    const CallsOf calls = calls_of_nodes();
    check_inputs();
    set_results();
    outline(module_, calls);
    body_->lint();
    for (const Module& m : module_.modules())
      if (m.hasattr("training")) Module(m).setattr("training", flags_ > 0 || frozen_.empty());
    return {module_, flags_, notes_};
  }

 private:
  std::vector<Node*> nodes() const { return {body_->nodes().begin(), body_->nodes().end()}; }

  const json& graph() const { return program_.at("graph_module").at("graph"); }

  // The program's node that a node stands for.
  const json& node_of(const Node* n) const { return graph().at("nodes").at(static_cast<size_t>(origin(n).value())); }

  void refuse_opaque() const {
    for (const Node* n : nodes()) {
      if (!is_opaque(n)) continue;
      const auto target = node_of(n).at("target").get<std::string>();
      const auto unknown = casts_unknown_.find(node_of(n).value("name", ""));
      const std::string why = unknown == casts_unknown_.end()
                                  ? "which TorchScript can't express"
                                  : fmt::format("and what that casts inside of {} can't be told", unknown->second);
      throw Error(ErrorKind::input, fmt::format("'{}' calls {}, {}, so it can't be imported; 'tsmem rewrite' takes it.",
                                                path_, target, why));
    }
  }

  // TorchScript drops them, as they give nothing.
  void leave_out_assertions() {
    size_t left_out = 0;
    for (Node* n : nodes())
      if (n->kind() == Symbol::aten("_assert_scalar")) {
        n->destroy();
        ++left_out;
      }
    if (left_out)
      notes_.push_back(fmt::format("{} of the program's, of sizes or by torch._check, are not in the import.",
                                   counted(left_out, "assertion")));
  }

  // Modules without parameters have no place yet, and some of them have a mode (Dropout).
  void add_modules() {
    const ModuleNames names(graph());
    for (const json& entry : program_.at("graph_module").at("module_call_graph"))
      if (const auto path = entry.at("fqn").get<std::string>(); !path.empty() && path.find('@') == path.npos)
        module_at(module_, path, names);
  }

  // The deepest module of a path that is there: its parts.
  std::vector<std::string> names_to(const std::string& path) const {
    std::vector<std::string> parts;
    Module m = module_;
    size_t from = 0;
    while (from < path.size()) {
      const size_t dot = std::min(path.find('.', from), path.size());
      const std::string name = path.substr(from, dot - from);
      if (!m.hasattr(name) || !m.attr(name).isModule()) break;
      m = m.attr(name).toModule();
      parts.push_back(name);
      from = dot + 1;
    }
    return parts;
  }

  // The flag of the module at `path`, read before `n`.
  Value* training(const std::string& path, Node* n) {
    const WithInsertPoint guard(n);
    Value* m = body_->inputs()[0];
    for (const std::string& name : names_to(path)) m = body_->insertGetAttr(m, name);
    return body_->insertGetAttr(m, "training");
  }

  void find_flags() {
    for (Node* n : nodes()) {
      const int at = mode_at(n);
      if (at < 0) continue;
      const auto mode = toIValue(n->input(at));
      if (!mode || !mode->isBool()) continue;
      if (mode->toBool()) {
        asks_.insert(n);
        if (is_norm(n)) trained_norms_.insert(mode_path(n));
      } else {
        frozen_.insert(n);
      }
    }
  }

  void give_flag(Node* n) {
    if (asks_.count(n)) {
      n->replaceInput(static_cast<size_t>(mode_at(n)), training(mode_path(n), n));
      ++flags_;
    }
    if (const int at = argument_at(n, {"dropout_p"}); at >= 0) {
      const auto p = toIValue(n->input(at));
      if (!p || !p->isDouble() || p->toDouble() == 0) return;
      n->replaceInput(at, choose(n, p->toDouble(), 0.));
      asks_.insert(n);
      ++flags_;
    }
  }

  // `in_training` or `in_eval`, as the flag says.
  Value* choose(Node* before, double in_training, double in_eval) {
    Value* flag = training(module_path(before), before);
    const WithInsertPoint guard(before);
    Node* both = body_->insertNode(body_->create(prim::If, {flag}, 1));
    for (const double p : {in_training, in_eval}) {
      Block* block = both->addBlock();
      const WithInsertPoint inside(block);
      block->registerOutput(body_->insertConstant(p));
    }
    both->output()->setType(FloatType::get());
    return both->output();
  }

  void count_batches_in_training(Node* n) {
    if (n->kind() != aten::add_) return;
    const Node* counter = n->input(0)->node();
    if (counter->kind() != prim::GetAttr || counter->s(attr::name) != "num_batches_tracked") return;
    const auto path = attribute_path(counter->input());
    if (!path || !trained_norms_.count(*path)) return;
    n->output()->replaceAllUsesWith(n->input(0));  // a norm that is called again counts on, and others may read it
    Value* flag = training(*path, n);
    const WithInsertPoint guard(n);
    Node* only = body_->insertNode(body_->create(prim::If, {flag}, 0));
    Block* block = only->addBlock();
    only->addBlock();
    n->moveBefore(block->return_node());
  }

  // torch.export switches cuDNN off while it looks, and writes down that it is off.
  void let_cudnn_run(Node* n) {
    const int at = argument_at(n, {"cudnn_enabled"});
    if (at < 0) return;
    const WithInsertPoint guard(n);
    n->replaceInput(static_cast<size_t>(at), body_->insertConstant(true));
  }

  // Of nodes that the program does not have, those of the node that they are there for: what a list is made for, or a
  // flag asked for, comes after it; a list is taken apart after what made it.
  CallsOf calls_of_nodes() const {
    CallsOf calls;
    std::vector<ModuleCall> current;
    const auto all = nodes();
    const auto look = [&](Node* n) {
      if (const auto index = origin(n)) current = module_stack(graph().at("nodes").at(static_cast<size_t>(*index)));
      return current;
    };
    for (auto n = all.rbegin(); n != all.rend(); ++n) calls[*n] = look(*n);
    for (Node* n : all)
      if (look(n); n->kind() == prim::ListUnpack) calls[n] = current;
    calls.erase(body_->outputs()[0]->node());
    return calls;
  }

  // What the program's own module checks before it runs.
  void check_inputs() {
    std::map<std::string, Value*> sizes;  // of the symbols
    Node* const first = *body_->nodes().begin();
    const json& values = graph().at("tensor_values");
    for (Value* input : body_->inputs().slice(1)) {
      const auto described = values.find(input->debugName());
      if (described == values.end()) continue;
      const WithInsertPoint guard(first);
      const json& dimensions = described->at("sizes");
      Value* good = insert(aten::eq, {insert(aten::dim, {input}), integer(dimensions.size())});
      // Sizes of a tensor with fewer dimensions can't be asked for, so that comes first.
      raise_unless(good, fmt::format("'{}' must have {}", input->debugName(), counted(dimensions.size(), "dimension")));
      for (size_t d = 0; d < dimensions.size(); ++d) {
        const ExportedSize wanted = exported_size(dimensions[d]);
        Value* size = insert(aten::size, {input, integer(d)});
        check_size(size, wanted, fmt::format("size {} of '{}'", d, input->debugName()), sizes);
      }
    }
  }

  void check_size(Value* size, const ExportedSize& wanted, const std::string& what,
                  std::map<std::string, Value*>& sizes) {
    // "Symbol('s77', positive=True, integer=True)", as sympy writes it.
    std::string symbol = wanted.expression;
    if (symbol.starts_with("Symbol('")) symbol = symbol.substr(8, symbol.find('\'', 8) - 8);
    if (symbol.empty())
      return raise_unless(insert(aten::eq, {size, integer(wanted.number)}),
                          fmt::format("{} must be {}", what, wanted.number));
    // An expression of others (2*s0) is not asked for: the graph's own operators meet it.
    if (!std::all_of(symbol.begin(), symbol.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; })) return;
    if (const auto known = sizes.find(symbol); known != sizes.end())
      return raise_unless(insert(aten::eq, {size, known->second}),
                          fmt::format("{} must be that of another input", what));
    sizes[symbol] = size;
    const json& ranges = program_.at("range_constraints");
    if (!ranges.contains(symbol)) return;
    const json &least = ranges.at(symbol).at("min_val"), &most = ranges.at(symbol).at("max_val");
    // 2 may be torch.export's own, for whatever is not 0 or 1 in its example, or a branch of the model's.
    if (least.is_number() && least.get<int64_t>() > 0)
      raise_unless(insert(aten::ge, {size, integer(least.get<int64_t>())}),
                   fmt::format("{} must be at least {}", what, least.get<int64_t>()),
                   least.get<int64_t>() == 2 ? "; export with torch.export.Dim(..., min=1) for one" : "");
    if (most.is_number() && most.get<int64_t>() < std::numeric_limits<int32_t>::max())
      raise_unless(insert(aten::le, {size, integer(most.get<int64_t>())}),
                   fmt::format("{} must be at most {}", what, most.get<int64_t>()));
  }

  Value* integer(int64_t x) { return body_->insertConstant(x); }
  Value* insert(Symbol op, std::initializer_list<Value*> operands) {
    return body_->insert(op, std::vector<NamedValue>(operands.begin(), operands.end()));
  }

  void raise_unless(Value* good, const std::string& what, const std::string& what_to_do = "") {
    Node* check = body_->insertNode(body_->create(prim::If, {good}, 0));
    check->addBlock();
    const WithInsertPoint inside(check->addBlock());
    Value* message = body_->insertConstant("forward: " + what + ", as the program was exported" + what_to_do + ".");
    Value* none = body_->insertConstant(IValue());
    body_->insertNode(body_->create(prim::RaiseException, {message, none}, 0));
  }

  // The program's outputs, constants among them, in place of the tuple of the values alone.
  void set_results() {
    Node* values = body_->outputs().at(0)->node();
    const WithInsertPoint guard(body_->return_node());
    std::vector<Value*> results;
    size_t at = 0;
    for (const json& output : graph().at("outputs")) {
      if (!names_in(json::array({output})).empty())
        results.push_back(values->input(at++));
      else
        results.push_back(constant(output));
    }
    Value* result =
        results.size() == 1 && returns_one() ? results[0] : body_->insertNode(body_->createTuple(results))->output();
    body_->eraseOutput(0);
    body_->registerOutput(result);
    values->destroy();
    Function& forward = *module_.type()->findMethod("forward");
    const FunctionSchema& schema = forward.getSchema();
    forward.setSchema(schema.cloneWithReturns({c10::Argument("", result->type())}));
  }

  Value* constant(const json& output) {
    const json& v = output.begin().value();
    if (v.is_boolean() && output.begin().key() == "as_bool") return body_->insertConstant(v.get<bool>());
    if (v.is_number_integer()) return body_->insertConstant(v.get<int64_t>());
    if (v.is_number_float()) return body_->insertConstant(v.get<double>());
    if (v.is_string()) return body_->insertConstant(v.get<std::string>());
    return body_->insertConstant(IValue());
  }

  // Whether forward returned a value by itself, not in a tuple or dict of one.
  bool returns_one() const {
    for (const json& entry : program_.at("graph_module").at("module_call_graph")) {
      if (entry.at("fqn") != "" || entry.at("signature").is_null()) continue;
      const json spec = json::parse(entry.at("signature").at("out_spec").get<std::string>());
      return spec.is_array() && spec.size() == 2 && spec[1].at("type").is_null();
    }
    return true;
  }

  void describe_what_stays() {
    std::set<std::string> norms, others, draw;
    for (const Node* n : frozen_) (is_norm(n) ? norms : others).insert(where(n));
    for (const Node* n : nodes())
      if (!asks_.count(n) && !frozen_.count(n) && argument_at(n, {"dropout_p"}) < 0 && draws(n)) draw.insert(where(n));
    if (flags_ == 0 && !frozen_.empty())
      notes_.push_back(fmt::format(
          "The program was exported in eval mode and stays in it: its {}; export it in train "
          "mode (model.train()) to train it as a whole.",
          norms.empty() ? "dropouts draw nothing" : "norms use their running statistics and never update them"));
    else if (!frozen_.empty())
      notes_.push_back(fmt::format("In eval mode when exported, and so in both modes now: {}.",
                                   listed(norms.empty() ? others : norms)));
    std::set<std::string> without_autocast;
    for (const Node* n : nodes())
      if (n->kind() == prim::CreateObject && n->output()->type()->annotation_str().ends_with(".autocast"))
        without_autocast.insert(module_path(n).empty() ? "the model itself" : module_path(n));
    if (!without_autocast.empty())
      notes_.push_back(fmt::format(
          "TorchScript does not keep an outer torch.autocast out of what switches autocast off, in {}: train "
          "the import without one.",
          listed(without_autocast)));
    if (!draw.empty())
      notes_.push_back(
          fmt::format("Random numbers that the model draws by itself are drawn in eval mode too: {}.", listed(draw)));
    describe_more_state();
  }

  // TorchScript has no buffers that a state_dict leaves out.
  void describe_more_state() {
    std::set<std::string> more;
    for (const json& spec : program_.at("graph_module").at("signature").at("input_specs")) {
      if (spec.contains("tensor_constant")) more.insert(spec.at("tensor_constant").at("tensor_constant_name"));
      if (spec.contains("buffer") && !spec.at("buffer").value("persistent", true))
        more.insert(spec.at("buffer").at("buffer_name"));
    }
    if (!more.empty())
      notes_.push_back(
          fmt::format("Constants and buffers that are not persistent are in the import's state_dict: {}; it takes the "
                      "model's own with strict=False.",
                      listed(more)));
  }

  const json& program_;
  const std::map<std::string, std::string>& casts_unknown_;
  std::string path_;
  Module module_;
  std::shared_ptr<Graph> body_;
  std::set<const Node*> asks_, frozen_;
  std::set<std::string> trained_norms_;
  size_t flags_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace

Imported import_exported(const ExportedProgram& program) {
  try {
    const ExportedProgram adapted = for_torchscript(program);
    return Importer(adapted).run();
  } catch (const json::exception&) {
    throw Error(
        ErrorKind::input,
        "'" + program.path + "' is damaged: its graph is not as torch.export writes it; copy or save it again.");
  }
}

}  // namespace tsmem
