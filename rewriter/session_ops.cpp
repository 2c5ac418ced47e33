// The library as operators, for Python: a loaded module goes in, a rewritten one comes out, in this process and without
// a file. Options and reports are JSON: names and values are those of the command line tool, '-' written as '_'.
#include <fmt/format.h>
#include <torch/library.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "rewriter/compare/diff_text.h"
#include "rewriter/error.h"
#include "rewriter/in_memory.h"
#include "rewriter/inputs.h"
#include "rewriter/measure/freed_memory.h"
#include "rewriter/measure/profile.h"
#include "rewriter/memory_file.h"
#include "rewriter/plan/size.h"
#include "rewriter/report_json.h"
#include "rewriter/text.h"
#include "rewriter/verify/verify.h"
#include "tsmem/session.h"

namespace tsmem {
namespace {

using c10::IValue;
using nlohmann::json;
using torch::jit::Module;

// The options of one call. Each is read once; what nobody has read is unknown.
class Options {
 public:
  Options(const std::string& function, const std::string& text) : function_(function), given_(json::parse(text)) {}

  template <class T>
  T get(const std::string& name, T otherwise = {}) {
    known_.push_back(name);
    if (!given(name)) return otherwise;
    try {
      return given_[name].get<T>();
    } catch (const json::exception&) {
      throw Error(ErrorKind::request,
                  fmt::format("{}() can't take {} for its option '{}'.", function_, given_[name].dump(), name));
    }
  }
  // One text or a list of them.
  std::vector<std::string> texts(const std::string& name) {
    if (given(name) && given_[name].is_string()) return {get<std::string>(name)};
    return get<std::vector<std::string>>(name);
  }
  // A size: a text, or a number of bytes.
  std::string size(const std::string& name) {
    if (given(name) && given_[name].is_number()) return std::to_string(get<int64_t>(name));
    return get<std::string>(name);
  }
  bool given(const std::string& name) const {
    return given_.contains(name) && !given_[name].is_null() && given_[name] != false;
  }
  void check_all_known() const {
    for (const auto& [name, value] : given_.items()) {
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      const std::string meant = nearest(name, known_);
      throw Error(ErrorKind::request, fmt::format("{}() has no option '{}'{}.", function_, name,
                                                  meant.empty() ? "" : " (did you mean '" + meant + "'?)"));
    }
  }

 private:
  std::string function_;
  json given_;
  std::vector<std::string> known_;
};

// What every function takes.
struct Run {
  std::string method, device;
  uint64_t seed;
  std::vector<std::string> specs;

  explicit Run(Options& o)
      : method(o.get<std::string>("method")),
        device(o.get<std::string>("device", "cpu")),
        seed(o.get<uint64_t>("seed")),
        specs(o.texts("input")) {
    require_device(device);
  }
  std::string method_or_forward() const { return method.empty() ? "forward" : method; }

  // Drawn as the texts of `input` say, or `examples`, a tuple of all arguments.
  std::vector<IValue> inputs(const IValue& examples, const std::string& on) const {
    if (!specs.empty() || examples.isNone()) return make_inputs(specs, "", seed, on);
    std::vector<IValue> all;
    for (const IValue& v : examples.toTupleRef().elements())
      all.push_back(map_tensors(v, [&](const at::Tensor& t) { return t.detach().to(c10::Device(on)); }));
    return all;
  }
};

std::string failure(const std::string& kind, const std::string& what) {
  return json{{"error", what}, {"kind", kind}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

// The JSON of what `work` returns, or of the error that ended it.
template <class F>
std::string reported(F work) {
  try {
    return json(work()).dump(-1, ' ', false, json::error_handler_t::replace);
  } catch (const Error& e) {
    const char* kinds[] = {"request", "input", "budget"};
    return failure(kinds[static_cast<int>(e.kind)], e.what());
  } catch (const std::bad_alloc&) {
    return failure("input", "There is not enough memory for this model and these inputs.");
  } catch (const std::exception& e) {
    return failure("bug", sentence(e) + "; this is a bug in tsmem " TSMEM_VERSION);
  }
}

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += by.size()) text.replace(at, what.size(), by);
}

Level level_of(Options& o) {
  const auto name = o.get<std::string>("level");
  for (const char* implies : {"budget", "fit", "batch_sizes", "estimate"})
    if (o.given(implies)) {
      if (!name.empty() && name != "plan")
        throw Error(ErrorKind::request, fmt::format("level='{}' and {} exclude each other.", name, implies));
      return Level::plan;
    }
  if (name.empty() || name == "regions") return Level::regions;
  if (name == "ops" || name == "plan") return name == "ops" ? Level::ops : Level::plan;
  throw Error(ErrorKind::request, fmt::format("level='{}' is not known; use ops, regions or plan.", name));
}

RewriteOptions rewriting(Options& o, const Run& run) {
  RewriteOptions r;
  r.level = level_of(o);
  r.only = o.texts("only");
  r.skip = o.texts("skip");
  r.module_globs = o.texts("module");
  r.checkpoint = o.texts("checkpoint");
  r.freeze = o.texts("freeze");
  r.train = o.texts("train");
  r.amp = o.get<std::string>("amp");
  r.method = run.method;
  if (r.level == Level::ops && !r.checkpoint.empty())
    throw Error(ErrorKind::request, "level='ops' and checkpoint exclude each other.");
  return r;
}

PlanOptions planning(Options& o, const Run& run) {
  PlanOptions how;
  how.method = run.method_or_forward();
  how.device = run.device;
  how.seed = run.seed;
  how.estimate = o.get<bool>("estimate");
  how.solver.seconds = o.get<double>("solve_seconds");
  return how;
}

// Rewrites what `open` gives as the options say, verifies it and hands it to `take`. Returns the report.
std::string rewrite_by(const IValue& examples, const std::string& text, const std::function<Session()>& open,
                       const std::function<void(const Session&)>& take) {
  return reported([&] {
    Options o("rewrite", text);
    const Run run(o);
    const RewriteOptions options = rewriting(o, run);
    PlanRequest request{o.size("budget"), o.size("fit"), o.get<std::vector<int64_t>>("batch_sizes"),
                        o.get<int>("optimizer_states"), planning(o, run)};
    const bool thorough = o.get<bool>("thorough"), no_verify = o.get<bool>("no_verify");
    o.check_all_known();
    const bool has_inputs = !run.specs.empty() || !examples.isNone();
    if (options.level == Level::plan && request.budget.empty() && request.fit.empty())
      throw Error(ErrorKind::request, "A plan needs a budget: budget='2GiB', or budget='40%' of the original's peak.");
    if (options.level == Level::plan && !has_inputs)
      throw Error(ErrorKind::request, "A plan needs an input: input='8x3x224x224', for example.");
    if (!request.fit.empty()) parse_size(request.fit, "fit", 0);
    if (!request.budget.empty()) parse_size(request.budget, "budget", 1 << 20);

    Session session = open();
    if (!run.method.empty() && !session.module().find_method(run.method))
      throw Error(ErrorKind::request, "The model has no method '" + run.method + "'.");
    std::vector<IValue> inputs;
    if (has_inputs) inputs = run.inputs(examples, request.how.estimate ? "meta" : run.device);
    if (has_inputs && !request.how.estimate) check_inputs(session.module(), run.method_or_forward(), inputs);
    json all;
    if (options.level == Level::plan) {
      const PlannedRewrite planned = session.plan(options, inputs, request);
      all = to_json(planned.report);
      all["predicted"] = to_json(planned.plan);
    } else {
      all = to_json(session.rewrite(options));
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
    take(session);
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
