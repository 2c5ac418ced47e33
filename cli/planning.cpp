#include "planning.h"

#include <fmt/format.h>
#ifdef __GLIBC__
#endif

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "freed_memory.h"
#include "rewriter/error.h"
#include "rewriter/model_file.h"
#include "rewriter/plan/milp.h"
#include "timeline.h"

namespace tsmem::cli {

using nlohmann::json;

void PlanLimits::add(CLI::App& app) {
  app.add_flag("--estimate", estimate, "Plan from shapes, FLOPs and bytes: run nothing");
  app.add_option("--solve-seconds", seconds, "Time limit of one solve (default 2, more for thousands of operators)")
      ->type_name("SECONDS")
      ->check(positive_number(1e6));
}

void PlanLimits::check(bool has_input, const std::string& amp) const {
  if (estimate && !amp.empty())
    throw Error(
        kUsage,
        "--estimate and --amp exclude each other: autocast does not act on shapes alone; leave --estimate out.");
  if (!has_input) throw Error(kUsage, "A plan needs an input: --input 8x3x224x224, for example.");
}

PlanOptions PlanLimits::options(const Common& common, const Progress& progress) const {
  PlanOptions options;
  options.seed = common.seed;
  options.solver.seconds = seconds;
  options.estimate = estimate;
  options.progress = [&progress](const std::string& text) { progress(text); };
  return options;
}

Planned::Planned(const std::string& path, torch::jit::Module& module, RewriteOptions rewriting,
                 const std::vector<c10::IValue>& inputs, const PlanOptions& options) {
  keep_freed_memory();
  // A module that has run can't be rewritten any more, so another copy of it runs.
  const std::string device = options.estimate ? "meta" : options.device;
  auto original = load_model(path, device).module;
  restore(original);
  rewriting.level = Level::plan;
  report = rewrite(module, rewriting);
  auto shapes = module;
  auto sites = report.sites;
  if (options.estimate) {
    shapes = load_model(path, device).module;
    sites = rewrite(shapes, rewriting).sites;
  }
  PlanOptions of_device = options;
  of_device.device = device;
  planner = std::make_unique<Planner>(original, shapes, std::move(sites), inputs, of_device);
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

std::string front_svg(const std::string& title, const Planned& planned, const std::vector<PlanPoint>& points) {
  const auto& original = planned.planner->original();
  struct Dot {
    double peak, time;  // ratios to the original
  };
  std::vector<Dot> dots;
  double fastest = 1, slowest = 1, most = 1;
  for (const PlanPoint& p : points) {
    dots.push_back({static_cast<double>(p.predicted_peak_bytes) / static_cast<double>(original.peak_bytes),
                    p.predicted_seconds / original.seconds});
    fastest = std::min(fastest, dots.back().time);
    slowest = std::max(slowest, dots.back().time);
    most = std::max(most, dots.back().peak);
  }
  const double low = std::floor((fastest - 0.02) * 20) / 20, high = std::ceil((slowest + 0.02) * 20) / 20;
  const double left = 86, right = 700, top = 64, bottom = 384;
  const auto x = [&](double ratio) { return left + ratio / (1.04 * most) * (right - left); };
  const auto y = [&](double ratio) { return bottom - (ratio - low) / (high - low) * (bottom - top); };
  std::string out = svg_head(740, 450);
  out += fmt::format("<text x='{}' y='28' class='title'>{}</text>\n", left, svg_text(title));
  out += fmt::format("<text x='{}' y='47'>the original: peak {}, a step {}</text>\n", left,
                     bytes_text(original.peak_bytes), seconds_text(original.seconds));
  for (double v = 0; v <= most + 1e-9; v += 0.1)
    out += fmt::format(
        "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' class='grid'/><text x='{0:.1f}' y='{3}' "
        "class='middle'>{4:.1f}</text>\n",
        x(v), top, bottom, bottom + 17, v);
  const double step = high - low > 0.6 ? 0.2 : high - low > 0.25 ? 0.1 : 0.05;
  for (double v = std::ceil(low / step - 1e-9) * step; v <= high + 1e-9; v += step)
    out += fmt::format(
        "<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' class='grid'/><text x='{3}' y='{4:.1f}' class='end'>{5:.2f}"
        "</text>\n",
        left, right, y(v), left - 6, y(v) + 4, v);
  out += fmt::format("<text x='{}' y='{}' class='middle'>peak memory of a step, as a ratio to the original's</text>\n",
                     (left + right) / 2, bottom + 40);
  out += fmt::format("<text transform='translate(24 {}) rotate(-90)' class='middle'>time of a step, ratio</text>\n",
                     (top + bottom) / 2);
  // Between two points the left one is the plan to take.
  std::string path = fmt::format("M{:.1f} {}", x(dots.front().peak), top);
  for (const Dot& d : dots) path += fmt::format("L{:.1f} {:.1f}", x(d.peak), y(d.time));
  out += fmt::format("<path d='{}' fill='none' stroke='#4e79a7' stroke-width='1.6'/>\n", path);
  for (size_t i = 0; i < dots.size(); ++i)
    out += fmt::format(
        "<circle cx='{:.1f}' cy='{:.1f}' r='4' fill='#4e79a7'><title>budget {}: peak {}, a step {}, run again {:.2f} "
        "GFLOP</title></circle>\n",
        x(dots[i].peak), y(dots[i].time), bytes_text(points[i].budget), bytes_text(points[i].predicted_peak_bytes),
        seconds_text(points[i].predicted_seconds), points[i].recomputed_flops / 1e9);
  out += fmt::format(
      "<circle cx='{0:.1f}' cy='{1:.1f}' r='5' class='peak'/><text x='{2:.1f}' y='{3:.1f}' class='end halo'>the "
      "original</text>\n",
      x(1), y(1), x(1) - 9, y(1) - 8);
  return out + "</svg>\n";
}

}  // namespace tsmem::cli
