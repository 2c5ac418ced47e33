#include "planning.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "rewriter/error.h"
#include "rewriter/memory.h"
#include "rewriter/milp.h"
#include "rewriter/model_file.h"
#include "timeline.h"

namespace tsmem::cli {

using nlohmann::json;

void PlanLimits::add(CLI::App& app) {
  app.add_flag("--estimate", estimate, "Plan from shapes, FLOPs and bytes: run nothing");
  app.add_option("--solve-seconds", seconds, "Time limit of one solve (default 5)")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
}

PlanOptions PlanLimits::options(const Common& common, const Progress& progress) const {
  PlanOptions options;
  options.seed = common.seed;
  options.solve_seconds = seconds;
  options.estimate = estimate;
  options.progress = [&progress](const std::string& text) { progress(text); };
  return options;
}

Planned::Planned(const std::string& path, torch::jit::Module& module, RewriteOptions rewriting,
                 const std::vector<c10::IValue>& inputs, const PlanOptions& options) {
  // A module that has run can't be rewritten any more, so another copy of it runs.
  auto original = load_model(path, options.device).module;
  restore(original);
  rewriting.level = Level::plan;
  report = rewrite(module, rewriting);
  planner = std::make_unique<Planner>(original, module, report.sites, inputs, options);
}

int64_t parse_size(const std::string& text, const std::string& option, int64_t whole) {
  static const std::map<std::string, double> units = {{"", 1},
                                                      {"B", 1},
                                                      {"K", 1024.},
                                                      {"KiB", 1024.},
                                                      {"KB", 1e3},
                                                      {"M", 1 << 20},
                                                      {"MiB", 1 << 20},
                                                      {"MB", 1e6},
                                                      {"G", 1 << 30},
                                                      {"GiB", 1 << 30},
                                                      {"GB", 1e9},
                                                      {"T", 1024. * (1 << 30)},
                                                      {"TiB", 1024. * (1 << 30)},
                                                      {"TB", 1e12}};
  const auto wrong = [&] {
    return Error(kUsage, fmt::format("{} '{}' is no size: write 2GiB, 1500MiB, bytes{}.", option, text,
                                     whole > 0 ? ", or 40% of the original's" : ""));
  };
  size_t end = 0;
  double number = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    throw wrong();
  }
  while (end < text.size() && text[end] == ' ') ++end;
  const std::string unit = text.substr(end);
  double bytes = 0;
  if (unit == "%" && whole > 0)
    bytes = number / 100 * static_cast<double>(whole);
  else if (auto it = units.find(unit); it != units.end())
    bytes = number * it->second;
  else
    throw wrong();
  if (!std::isfinite(bytes) || bytes <= 0 || bytes > 9e18) throw wrong();
  return static_cast<int64_t>(bytes);
}

json front_json(const Planned& planned, const std::vector<PlanPoint>& points) {
  json all = json::array();
  for (const PlanPoint& p : points)
    all.push_back({{"budget", p.budget},
                   {"predicted_peak_bytes", p.predicted_peak_bytes},
                   {"predicted_seconds", p.predicted_seconds},
                   {"kept_bytes", p.kept_bytes},
                   {"recomputed_flops", p.recomputed_flops},
                   {"gap", p.gap}});
  return {{"points", all},
          {"smallest_budget", points.front().predicted_peak_bytes},
          {"solver", solver_name()},
          {"solve_seconds", planned.planner->solve_seconds()},
          {"original",
           {{"peak_bytes", planned.planner->original().peak_bytes},
            {"saved_bytes", planned.planner->original().kept_bytes},
            {"step_seconds", planned.planner->original().seconds}}}};
}

std::string front_svg(const std::string&, const Planned&, const std::vector<PlanPoint>&) { return ""; }

}  // namespace tsmem::cli
