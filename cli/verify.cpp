// tsmem verify: do two models give the same numbers?
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/run_options.h"
#include "rewriter/error.h"
#include "rewriter/file/model_file.h"
#include "rewriter/measure/as_it_runs.h"
#include "rewriter/measure/freed_memory.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/verify/verify.h"

namespace tsmem::cli {
namespace {

struct VerifyArguments {
  std::string a, b;
  RunOptions run;
  bool train = false, eval = false, no_measure = false, thorough = false;
  int calls = 0, seeds = 0;
};

std::string error_text(double e) {
  if (std::isnan(e)) return "-";
  if (std::isinf(e)) return "other shape";
  return e == 0 ? "0" : fmt::format("{:.1e}", e);
}

void print_calls(const VerifyResult& r) {
  std::vector<std::vector<std::string>> rows = {{"mode", "call", "outputs", "gradients", "buffers", "float64"}};
  int n = 0;
  for (size_t i = 0; i < r.calls.size(); ++i) {
    auto& c = r.calls[i];
    n = i && r.calls[i - 1].mode == c.mode ? n + 1 : 1;
    bool grad = c.mode != "no_grad";
    rows.push_back({c.mode, std::to_string(n), error_text(c.output_error), grad ? error_text(c.gradient_error) : "-",
                    error_text(c.buffer_error), error_text(c.f64_error)});
  }
  for (size_t c = 1; c < rows[0].size(); ++c) align_right(rows, c);
  if (rows.size() == 1) return;
  print("\nRelative errors of the second model against the first\n" + table(rows));
  print(
      "outputs, gradients, buffers: in the models' own dtype, the worst tensor. float64: the worst of the three where "
      "both run in float64.\n");
}

// A difference that looks large and is none: float32 is as far off by itself.
void print_rounding(const VerifyResult& r) {
  constexpr double kLooksLarge = 1e-3;
  struct Kind {
    const char* name;
    double CallResult::*error;
    double (CallResult::*reference)[2];
  };
  static constexpr Kind kinds[] = {{"outputs", &CallResult::output_error, &CallResult::reference_output},
                                   {"gradients", &CallResult::gradient_error, &CallResult::reference_gradient},
                                   {"buffers", &CallResult::buffer_error, &CallResult::reference_buffer}};
  for (const Kind& kind : kinds) {
    const CallResult* worst = nullptr;
    for (const CallResult& c : r.calls)
      if (c.*kind.error > kLooksLarge && std::isfinite((c.*kind.reference)[0]) &&
          (!worst || c.*kind.error > worst->*kind.error))
        worst = &c;
    if (!worst) continue;
    print(fmt::format(
        "\nThe {} differ by {} and the models are equal all the same: that is rounding. Against float64 the "
        "first model's are off by {}, the second's by {}; both in float64 differ by {}.\n",
        kind.name, error_text(worst->*kind.error), error_text((worst->*kind.reference)[0]),
        error_text((worst->*kind.reference)[1]), error_text(worst->f64_error)));
  }
}

void print_figures(const VerifyResult& r) {
  if (!r.measured) return;
  std::vector<std::vector<std::string>> rows = {{"", "first", "second", "ratio"}};
  auto bytes = [&](const char* name, const int64_t(&v)[2]) {
    rows.push_back(
        {name, bytes_text(v[0]), bytes_text(v[1]), ratio_text(static_cast<double>(v[1]), static_cast<double>(v[0]))});
  };
  bytes("saved for backward", r.saved_bytes);
  bytes("peak", r.peak_bytes);
  rows.push_back({"step", seconds_text(r.step_seconds[0]), seconds_text(r.step_seconds[1]),
                  ratio_text(r.step_seconds[1], r.step_seconds[0])});
  for (size_t c = 1; c < rows[0].size(); ++c) align_right(rows, c);
  print("\n" + table(rows));
}

// An error that is about one of the models names its file.
VerifyResult verify_files(const VerifyArguments& o, const torch::jit::Module& a, const torch::jit::Module& b,
                          const std::vector<c10::IValue>& inputs, const VerifyOptions& options) {
  try {
    return verify(a, b, inputs, options);
  } catch (const Error& e) {
    const std::string what = e.what();
    for (const auto& [model, file] : {std::pair{"The first model", o.a}, std::pair{"The second model", o.b}})
      if (what.starts_with(model)) throw Error(e.kind, "'" + file + "': " + what, e.option);
    throw;
  }
}

int run(const VerifyArguments& o, const Common& common) {
  o.run.apply();
  require_device(o.run.device);
  auto a = load_model(o.a, o.run.device), b = load_model(o.b, o.run.device);
  auto inputs = make_inputs(o.run.inputs, o.run.inputs_file, common.seed, o.run.device);
  const KeepFreedMemory keep;
  VerifyOptions options;
  options.method = o.run.method;
  options.device = o.run.device;
  options.calls = o.calls;
  options.seeds = o.seeds;
  options.seed = common.seed;
  options.spent = seconds_since(common.started);
  options.train_mode = o.train || !o.eval;
  // A program has one mode: that in which it was exported.
  options.eval_mode = o.eval || (!o.train && !(a.exported && b.exported));
  options.measure = !o.no_measure;
  if (o.thorough) options.thorough = true;
  Progress progress(common);
  options.progress = [&](const std::string& text, double done) { progress(text, done); };
  const auto guard = as_it_runs(a.exported && b.exported);
  auto r = verify_files(o, a.module, b.module, inputs, options);
  progress.clear();
  int code = r.equal ? kOk : kDifferent;
  if (!o.run.json.empty()) write_json(to_json(r), o.run.json, {o.a, o.b});
  if (o.run.json == "-") return code;
  print(paint(r.verdict, r.equal ? Color::green : Color::red, use_color(common)) + "\n");
  size_t shown = common.verbose ? r.differences.size() : std::min<size_t>(r.differences.size(), 10);
  if (r.differences.size() > 1) {
    print("\nDifferences\n");
    for (size_t i = 0; i < shown; ++i) print("  " + r.differences[i] + "\n");
    if (shown < r.differences.size()) print(fmt::format("  and {} more; -v shows all\n", r.differences.size() - shown));
  }
  if (!common.quiet) {
    if (const auto compared = compared_line(r); !compared.empty()) print("\n" + compared + "\n");
    print_calls(r);
    if (r.equal) print_rounding(r);
    print_figures(r);
    for (auto& note : r.notes) print("\n" + note + "\n");
  }
  return code;
}

}  // namespace

Run add_verify(CLI::App& app, const Common& common) {
  auto o = std::make_shared<VerifyArguments>();
  app.add_option("A.pt", o->a, "The original")->required();
  app.add_option("B.pt", o->b, "The model that should be the same")->required();
  o->run.add(app);
  app.add_option("--calls", o->calls,
                 "Calls to compare in each mode, also where that takes long (default 4, fewer where the time is short)")
      ->type_name("N")
      ->check(whole_number(1, 10000));
  app.add_option("--seeds", o->seeds,
                 "Inputs over which median error ratios are taken (default 5, fewer where the time is short)")
      ->type_name("N")
      ->check(whole_number(1, 10000));
  app.add_flag("--train", o->train, "In train mode alone");
  app.add_flag("--eval", o->eval, "In eval mode alone, with and without grad");
  app.add_flag("--thorough", o->thorough,
               "Compare every call on the inputs given, however long it takes: without it verification aims at 20 "
               "seconds, or ten training steps' time, and uses smaller inputs where it has to");
  app.add_flag("--no-measure", o->no_measure, "Compare numbers alone, not memory and time");
  app.footer(
      "Example: tsmem verify model.pt model.mem.pt --input 8x3x224x224\n\nExit code 0 where the models are equal, 1 "
      "where not.");
  return [o, &common] { return run(*o, common); };
}

}  // namespace tsmem::cli
