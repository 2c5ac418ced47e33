// tsmem plan: peak memory against step time.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/front_svg.h"
#include "cli/planning.h"
#include "cli/png.h"
#include "cli/run_options.h"
#include "rewriter/error.h"
#include "rewriter/file/new_file.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/session/report_json.h"
#include "tsmem/session.h"

namespace tsmem::cli {
namespace {

struct PlanArguments {
  std::string model, plot;
  RunOptions run;
  PlanLimits limits;
  int points = 10;
  std::string amp;
  std::vector<std::string> patterns;
};

void check_files(const PlanArguments& o) {
  check_report(o.run.json);
  if (!o.plot.empty() && !o.plot.ends_with(".svg") && !o.plot.ends_with(".png"))
    throw Error(ErrorKind::request,
                "--plot '" + o.plot + "' is not a picture that plan draws; end its name in .svg or .png.");
  if (o.plot.ends_with(".png")) require_png();
  if (o.plot.empty()) return;
  if (o.plot == o.run.json) throw Error(ErrorKind::request, "--plot and --json name the same file.");
  check_report(o.plot);
  if (same_file(o.plot, o.model))
    throw Error(ErrorKind::request, "'" + o.plot + "' would replace a model that this command reads.");
}

int run(const PlanArguments& o, const Common& common) {
  check_files(o);
  o.run.apply();
  require_device(o.run.device);
  o.limits.check(!o.run.inputs.empty() || !o.run.inputs_file.empty(), o.amp);
  RewriteOptions rewriting;
  rewriting.amp = o.amp;
  rewriting.patterns = read_patterns(o.patterns);
  Session session(o.model);
  auto inputs = make_inputs(o.run.inputs, o.run.inputs_file, common.seed, o.limits.estimate ? "meta" : o.run.device);
  const Progress progress(common);
  PlanOptions options = o.limits.options(common, progress);
  options.method = o.run.method;
  options.device = o.run.device;
  const PlanFront front = session.front(rewriting, inputs, options, o.points);
  const auto& [points, original, solver, solve_seconds, solves] = front;
  progress.clear();
  if (!o.run.json.empty()) write_json(to_json(front), o.run.json, {o.model});
  if (!o.plot.empty()) {
    const auto svg = front_svg(o.model, front);
    save_text(o.plot.ends_with(".png") ? png_of(svg) : svg, o.plot);
  }
  if (o.run.json == "-") return kOk;
  const auto ratio = [](double a, double b) { return fmt::format("{:.3f}", a / b); };
  std::vector<std::vector<std::string>> rows = {
      {"budget", "peak", "of original", "kept", "step", "of original", "run again, GFLOP"}};
  if (o.limits.offload) rows[0].push_back("offloaded");
  for (const PlanPoint& p : points) {
    rows.push_back({bytes_text(p.budget), bytes_text(p.predicted_peak_bytes),
                    ratio(static_cast<double>(p.predicted_peak_bytes), static_cast<double>(original.peak_bytes)),
                    bytes_text(p.kept_bytes), seconds_text(p.predicted_seconds),
                    ratio(p.predicted_seconds, original.seconds), fmt::format("{:.2f}", p.recomputed_flops / 1e9)});
    if (o.limits.offload) rows.back().push_back(bytes_text(p.offloaded_bytes));
  }
  for (size_t c = 0; c < rows[0].size(); ++c) align_right(rows, c);
  print(table(rows));
  print(fmt::format("\nThe original: peak {}, step {}. The smallest budget is {}. {} solved {} in {}.\n",
                    bytes_text(original.peak_bytes), seconds_text(original.seconds),
                    bytes_text(points.front().predicted_peak_bytes), solver, counted(solves, "program"),
                    seconds_text(solve_seconds)));
  return kOk;
}

}  // namespace

Run add_plan(CLI::App& app, const Common& common) {
  auto o = std::make_shared<PlanArguments>();
  app.description("Show peak memory against step time, for every budget");
  app.add_option("MODEL.pt", o->model, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  o->run.add(app);
  o->limits.add(app);
  app.add_option("--points", o->points, "Budgets, from the smallest to the original's peak (default 10)")
      ->type_name("N")
      ->check(whole_number(2, 100));
  app.add_option("--amp", o->amp, "Plan for forward under autocast, as rewrite --amp writes it")
      ->check(CLI::IsMember({"bf16", "f16"}));
  add_patterns_option(app, o->patterns);
  app.add_option("--plot", o->plot, "Draw the front, as .svg or .png")->type_name("FILE");
  app.footer(
      "Example: tsmem plan model.pt --input 8x3x224x224 --plot front.svg\n\n"
      "Peaks are measured with each plan, on this device; 'tsmem rewrite --budget' writes the model for one of them.");
  return [o, &common] { return run(*o, common); };
}

}  // namespace tsmem::cli
