#include "rewriter/graph/origin.h"

#include <torch/csrc/jit/runtime/operator.h>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/modules.h"

namespace tsmem {

using namespace torch::jit;

static const c10::Symbol kIndex = c10::Symbol::attr("tsmem_node"), kPath = c10::Symbol::attr("tsmem_module"),
                         kOwnResults = c10::Symbol::attr("tsmem_results");

void set_origin(Node* node, int64_t index, const std::string& path) {
  node->i_(kIndex, index);
  if (!path.empty()) node->s_(kPath, path);
}

std::optional<int64_t> origin(const Node* node) {
  return node->hasAttribute(kIndex) ? std::optional<int64_t>(node->i(kIndex)) : std::nullopt;
}

std::string module_path(const Node* node) { return node->hasAttribute(kPath) ? node->s(kPath) : ""; }

void take_path(Node* node, const Node* from) {
  if (from->hasAttribute(kPath)) node->s_(kPath, from->s(kPath));
}

void set_own_results(Node* tuple, int64_t count) { tuple->i_(kOwnResults, count); }

bool runs_for_its_effect(const Node* node) {
  const auto added = [](const Use& use) {
    return use.user->hasAttribute(kOwnResults) && static_cast<int64_t>(use.offset) >= use.user->i(kOwnResults);
  };
  const auto outputs = node->outputs();
  return node->hasUses() && std::all_of(outputs.begin(), outputs.end(), [&](const Value* v) {
           return std::all_of(v->uses().begin(), v->uses().end(), added);
         });
}

c10::Symbol opaque_symbol() {
  // LibTorch asks every node for its schema: this one takes and gives whatever it likes, and has effects.
  static const bool registered = [] {
    if (getAllOperatorsFor(c10::Symbol::fromQualString("tsmem_graph::opaque")).empty())
      registerOperator(Operator(
          "tsmem_graph::opaque(...) -> ...",
          [](Stack&) { throw std::runtime_error("an operator on functions can't be run by TorchScript"); },
          c10::AliasAnalysisKind::CONSERVATIVE));
    return true;
  }();
  (void)registered;
  return c10::Symbol::fromQualString("tsmem_graph::opaque");
}

bool is_opaque(const Node* node) { return node->kind() == opaque_symbol(); }

bool has_opaque(const Module& module) {
  const auto forward = module.find_method("forward");
  if (!forward) return false;
  const GraphFunction* body = graph_function(&forward->function());
  if (!body) return false;
  const auto nodes = body->graph()->nodes();
  return std::any_of(nodes.begin(), nodes.end(), is_opaque);
}

}  // namespace tsmem
