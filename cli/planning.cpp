#include "cli/planning.h"

#include <fmt/format.h>

#include <cmath>

#include "cli/timeline.h"
#include "rewriter/error.h"

namespace tsmem::cli {

void PlanLimits::add(CLI::App& app) {
  app.add_flag("--estimate", estimate, "Plan from shapes, FLOPs and bytes: run nothing");
  app.add_option("--solve-seconds", seconds, "Time limit of one solve (default 2, more for thousands of operators)")
      ->type_name("SECONDS")
      ->check(positive_number(1e6));
}

void PlanLimits::check(bool has_input, const std::string& amp) const {
  if (estimate && !amp.empty())
    throw Error(
        ErrorKind::request,
        "--estimate and --amp exclude each other: autocast does not act on shapes alone; leave --estimate out.");
  if (!has_input) throw Error(ErrorKind::request, "A plan needs an input: --input 8x3x224x224, for example.");
}

PlanOptions PlanLimits::options(const Common& common, const Progress& progress) const {
  PlanOptions options;
  options.seed = common.seed;
  options.solver.seconds = seconds;
  options.estimate = estimate;
  options.progress = [&progress](const std::string& text) { progress(text); };
  return options;
}

std::string front_svg(const std::string& title, const PlanFront& front) {
  const auto& points = front.points;
  const auto& original = front.original;
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
