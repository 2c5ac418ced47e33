// Rewriting a graph that Python describes, as an operator: JSON goes in and comes out, in the form of torch.export's
// archives (rewriter/graph/exported_graph.h).
#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/library.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "rewriter/error.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/modules.h"
#include "rewriter/session/report_json.h"
#include "rewriter/session/session_options.h"
#include "tsmem/session.h"

namespace tsmem {
namespace {

using c10::IValue;
using nlohmann::json;
using torch::jit::Module;

// Tensors without memory, from "state": {path: {"dtype": exported, "requires_grad": bool, "storage": a number that
// those which share memory have in common}}.
StateOf stand_ins(const json& state) {
  auto storages = std::make_shared<std::unordered_map<int64_t, c10::Storage>>();
  return [&state, storages](const std::string& path) {
    const json& about = state.at(path);
    const auto dtype = dtype_of(about.at("dtype").get<int64_t>());
    if (dtype == c10::ScalarType::Undefined)
      throw Error(ErrorKind::input, fmt::format("'{}' has a dtype that tsmem doesn't know.", path));
    at::Tensor t = at::empty({0}, at::TensorOptions(at::kMeta).dtype(dtype));
    const auto [known, is_new] = storages->emplace(about.at("storage").get<int64_t>(), t.storage());
    if (!is_new)
      t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(known->second),
                                                   c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
    if (about.value("requires_grad", false)) t.set_requires_grad(true);
    return t;
  };
}

// Copies of the tensors at "state"'s "position", each storage once.
StateOf copies(const json& state, const c10::List<at::Tensor>& tensors) {
  auto done = std::make_shared<std::unordered_map<const void*, at::Tensor>>();
  return [&state, &tensors, done](const std::string& path) {
    const at::Tensor t = tensors.get(state.at(path).at("position").get<size_t>());
    const at::NoGradGuard no_grad;
    at::Tensor& flat = (*done)[t.storage().unsafeGetStorageImpl()];
    if (!flat.defined()) {
      flat = at::empty({static_cast<int64_t>(t.storage().nbytes())}, t.options().dtype(at::kByte).requires_grad(false));
      flat.copy_(at::empty({0}, flat.options()).set_(t.storage()));
    }
    at::Tensor copy = at::empty({0}, t.options().requires_grad(false));
    copy.set_(flat.storage(), t.storage_offset(), t.sizes(), t.strides());
    return copy.set_requires_grad(t.requires_grad());
  };
}

// What a graph has no place for.
void refuse_options_of_files(const RewriteOptions& options) {
  const auto refuse = [](bool given, const char* option, const char* instead) {
    if (given)
      throw Error(ErrorKind::request, fmt::format("'{}' is for TorchScript models; in Python, {}.", option, instead));
  };
  refuse(!options.checkpoint.empty(), "checkpoint", "call the module by torch.utils.checkpoint.checkpoint");
  refuse(!options.freeze.empty() || !options.train.empty(), "freeze or train", "set the parameters' requires_grad");
  refuse(!options.amp.empty(), "amp", "run the model under torch.autocast");
  refuse(!options.method.empty(), "method", "compile the method itself");
}

std::string rewrite_graph(const std::string& description, const c10::List<at::Tensor>& state, const IValue& examples,
                          const std::string& text) {
  return reported([&] {
    Options o("rewrite", text);
    const Run run(o);
    RewriteOptions options = rewriting(o, run);
    refuse_options_of_files(options);
    options.runs_eagerly = true;
    const PlanRequest request = plan_request(o, run);
    o.check_all_known();
    const json graph = json::parse(description);
    const json& about = graph.at("state");
    if (options.level != Level::plan) {
      Module module = module_of_graph(graph, stand_ins(about));
      json all = to_json(rewrite(module, options));
      all["graph_module"] = graph_of_module(module, graph);
      return all;
    }
    check_plan_request(request, options.level, !run.specs.empty() || !examples.isNone());
    const Module original = module_of_graph(graph, copies(about, state));
    if (has_opaque(original))
      throw Error(
          ErrorKind::request,
          "A budget needs a graph that can be run as a whole, and this one has an operator on functions in it.");
    Session session(original, module_of_graph(graph, copies(about, state)));
    const PlannedRewrite planned =
        session.plan(options, run.inputs(examples, request.how.estimate ? "meta" : run.device), request);
    json all = to_json(planned.report);
    all["predicted"] = to_json(planned.plan);
    all["graph_module"] = graph_of_module(session.module(), graph);
    return all;
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tsmem_session, m) {
  m.def(torch::schema("rewrite_graph(str graph, Tensor[] state, Any examples, str options) -> str",
                      c10::AliasAnalysisKind::CONSERVATIVE),
        rewrite_graph);
}

}  // namespace tsmem
