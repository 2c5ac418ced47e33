// The library as operators, for Python: a loaded module goes in, a rewritten one comes out, in this process and without
// a file. Options and reports are JSON: names and values are those of the command line tool, '-' written as '_'.
#include <fmt/format.h>
#include <torch/library.h>

#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "rewriter/compare/diff_text.h"
#include "rewriter/error.h"
#include "rewriter/in_memory.h"
#include "rewriter/inputs.h"
#include "rewriter/measure/freed_memory.h"
#include "rewriter/measure/profile.h"
#include "rewriter/memory_file.h"
#include "rewriter/plan/size.h"
#include "rewriter/report_json.h"
#include "rewriter/session_options.h"
#include "rewriter/verify/verify.h"
#include "tsmem/session.h"

namespace tsmem {
namespace {

using c10::IValue;
using nlohmann::json;
using torch::jit::Module;

// Rewrites what `open` gives as the options say, verifies it and hands it to `take`. Returns the report.
std::string rewrite_by(const IValue& examples, const std::string& text, const std::function<Session()>& open,
                       const std::function<void(const Session&)>& take) {
  return reported([&] {
    Options o("rewrite", text);
    const Run run(o);
    const RewriteOptions options = rewriting(o, run);
    PlanRequest request = plan_request(o, run);
    const bool thorough = o.get<bool>("thorough"), no_verify = o.get<bool>("no_verify");
    o.check_all_known();
    const bool has_inputs = !run.specs.empty() || !examples.isNone();
    check_plan_request(request, options.level, has_inputs);

    Session session = open();
    if (!run.method.empty() && !session.module().find_method(run.method))
      throw Error(ErrorKind::request, "The model has no method '" + run.method + "'.");
    std::vector<IValue> inputs;
    if (has_inputs) inputs = run.inputs(examples, request.how.estimate ? "meta" : run.device);
    if (has_inputs && !request.how.estimate) check_inputs(session.module(), run.method_or_forward(), inputs);
    json predicted;
    RewriteReport report;
    if (options.level == Level::plan) {
      PlannedRewrite planned = session.plan(options, inputs, request);
      report = std::move(planned.report);
      predicted = to_json(planned.plan);
    } else {
      report = session.rewrite(options);
    }
    if (has_inputs && !no_verify && !request.how.estimate) {
      VerifyOptions how;
      how.method = run.method_or_forward();
      how.device = run.device;
      how.seed = run.seed;
      how.measure = false;
      if (thorough) how.thorough = true;
      const VerifyResult verified = session.verify(inputs, how);
      if (!verified.equal)
        return json{{"error", "The rewritten model failed its verification: " + verified.verdict},
                    {"kind", "different"}};
    } else if (const auto differences = session.structure_differences(); !differences.empty()) {
      throw std::runtime_error("The rewritten model differs from the original: " + differences[0]);
    }
    if (has_inputs) session.measure_saved(report, inputs, request.how.estimate ? "meta" : run.device);
    take(session);
    json all = to_json(report);
    if (!predicted.is_null()) all["predicted"] = std::move(predicted);
    return all;
  });
}

std::tuple<IValue, std::string> rewrite_op(const IValue& module, const IValue& examples, const std::string& text) {
  IValue result = module;
  const auto report = rewrite_by(
      examples, text, [&] { return Session(Module(module.toObject())); },
      [&](const Session& session) { result = session.module()._ivalue(); });
  return {result, report};
}

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += by.size()) text.replace(at, what.size(), by);
}

// An archive of torch.export as bytes, and the rewritten one.
std::tuple<at::Tensor, std::string> rewrite_exported_op(const at::Tensor& archive, const IValue& examples,
                                                        const std::string& text) {
  at::Tensor result = at::empty({0}, at::kByte);
  std::optional<MemoryFile> file;
  std::string report = rewrite_by(
      examples, text,
      [&] {
        file.emplace(std::string_view(static_cast<const char*>(archive.const_data_ptr()), archive.nbytes()));
        return Session(file->path());
      },
      [&](const Session& session) {
        const auto bytes = session.bytes();
        result = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
        std::memcpy(result.mutable_data_ptr(), bytes.data(), bytes.size());
      });
  // The user knows of no file.
  if (file) replace_all(report, "'" + file->path() + "'", "The program");
  return {result, report};
}

std::tuple<IValue, std::string> restore_op(const IValue& module) {
  IValue result = module;
  const std::string report = reported([&] {
    Session session{Module(module.toObject())};
    session.restore();
    result = session.module()._ivalue();
    return json::object();
  });
  return {result, report};
}

std::string verify_op(const IValue& a, const IValue& b, const IValue& examples, const std::string& text) {
  return reported([&] {
    Options o("verify", text);
    const Run run(o);
    VerifyOptions how;
    how.method = run.method_or_forward();
    how.device = run.device;
    how.seed = run.seed;
    how.calls = o.get<int>("calls");
    how.seeds = o.get<int>("seeds");
    const bool train = o.get<bool>("train"), eval = o.get<bool>("eval");
    how.train_mode = train || !eval;
    how.eval_mode = eval || !train;
    how.measure = !o.get<bool>("no_measure");
    if (o.get<bool>("thorough")) how.thorough = true;
    o.check_all_known();
    const KeepFreedMemory keep;
    const Module first = copy_in_memory(Module(a.toObject()), run.device);
    const Module second = copy_in_memory(Module(b.toObject()), run.device);
    return to_json(verify(first, second, run.inputs(examples, run.device), how));
  });
}

std::string profile_op(const IValue& module, const IValue& examples, const std::string& text) {
  return reported([&] {
    Options o("profile", text);
    const Run run(o);
    ProfileOptions how;
    how.method = run.method_or_forward();
    how.device = run.device;
    how.seed = run.seed;
    how.train = !o.get<bool>("eval");
    how.input_grad = o.get<bool>("input_grad");
    how.steps = o.get<int>("steps", how.steps);
    how.warmup = o.get<int>("warmup", how.warmup);
    o.check_all_known();
    Module copy = copy_in_memory(Module(module.toObject()), run.device);
    return to_json(profile(copy, run.inputs(examples, run.device), how));
  });
}

std::string plan_op(const IValue& module, const IValue& examples, const std::string& text) {
  return reported([&] {
    Options o("plan", text);
    const Run run(o);
    const PlanOptions how = planning(o, run);
    RewriteOptions options;
    options.amp = o.get<std::string>("amp");
    options.patterns = patterns(o);
    const int points = o.get<int>("points", 10);
    o.check_all_known();
    if (points < 2) throw Error(ErrorKind::request, "plan() needs at least 2 points.");
    Session session{Module(module.toObject())};
    return to_json(session.front(options, run.inputs(examples, how.estimate ? "meta" : run.device), how, points));
  });
}

std::string diff_op(const IValue& a, const IValue& b, const std::string& text) {
  return reported([&] {
    Options o("diff", text);
    const auto method = o.get<std::string>("method");
    o.check_all_known();
    return to_json(diff(Module(a.toObject()), Module(b.toObject()), method));
  });
}

TORCH_LIBRARY(tsmem_session, m) {
  // Modules are of any type, and what happens to them is nobody's to guess.
  const auto define = [&m](const char* schema, auto function) {
    m.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE), function);
  };
  define("rewrite(Any module, Any examples, str options) -> (Any, str)", rewrite_op);
  define("rewrite_exported(Tensor archive, Any examples, str options) -> (Tensor, str)", rewrite_exported_op);
  define("restore(Any module) -> (Any, str)", restore_op);
  define("verify(Any a, Any b, Any examples, str options) -> str", verify_op);
  define("profile(Any module, Any examples, str options) -> str", profile_op);
  define("plan(Any module, Any examples, str options) -> str", plan_op);
  define("diff(Any a, Any b, str options) -> str", diff_op);
}

}  // namespace
}  // namespace tsmem
