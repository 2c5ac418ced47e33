#include "cli/front_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/run_options.h"
#include "cli/svg.h"

namespace tsmem::cli {
namespace {

constexpr double kWidth = 740, kHeight = 450;

struct Dot {
  double peak, time;  // ratios to the original
};

// The ratios that are drawn, and where.
struct Frame {
  double left = 86, right = 700, top = 64, bottom = 384;
  double most = 1, low = 1, high = 1;
  explicit Frame(const std::vector<Dot>& dots) {
    for (const Dot& d : dots) {
      most = std::max(most, d.peak);
      low = std::min(low, d.time);
      high = std::max(high, d.time);
    }
    const double margin = std::max(0.02, 0.08 * (high - low));  // a label's height above the slowest
    low = std::floor((low - margin) * 20) / 20;
    high = std::ceil((high + margin) * 20) / 20;
  }
  double x(double ratio) const { return left + ratio / (1.04 * most) * (right - left); }
  double y(double ratio) const { return bottom - (ratio - low) / (high - low) * (bottom - top); }
};

std::string axes(const Frame& f) {
  std::string out;
  const double along = mark_step(f.most, 10);
  for (double v = 0; v <= f.most + 1e-9; v += along)
    out += fmt::format(
        "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' class='grid'/><text x='{0:.1f}' y='{3}' "
        "class='middle'>{4:.1f}</text>\n",
        f.x(v), f.top, f.bottom, f.bottom + 20, v);
  const double up = mark_step(f.high - f.low, 7);
  for (double v = std::ceil(f.low / up - 1e-9) * up; v <= f.high + 1e-9; v += up)
    out += fmt::format(
        "<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' class='grid'/><text x='{3}' y='{4:.1f}' class='end'>{5:.2f}"
        "</text>\n",
        f.left, f.right, f.y(v), f.left - 6, f.y(v) + 4, v);
  out += fmt::format("<text x='{}' y='{}' class='middle'>peak memory of a step, as a ratio to the original's</text>\n",
                     (f.left + f.right) / 2, f.bottom + 42);
  return out +
         fmt::format("<text transform='translate(24 {}) rotate(-90)' class='middle'>time of a step, ratio</text>\n",
                     (f.top + f.bottom) / 2);
}

// A text beside a dot that may not leave the frame or touch another such text.
struct Label {
  std::string text;
  bool before;  // the dot, else behind it
  double from, to, y;
  Label(std::string words, double x, double at, bool left_of) : text(std::move(words)), before(left_of), y(at) {
    const double width = text_width(text, true);
    from = before ? x - 9 - width : x + 9;
    to = from + width;
  }
  bool touches(const Label& o) const { return from < o.to && o.from < to && std::abs(y - o.y) < 14; }
  std::string svg() const {
    return fmt::format("<text x='{:.1f}' y='{:.1f}' class='{}'>{}</text>\n", before ? to : from, y,
                       before ? "end halo" : "halo", svg_text(text));
  }
};

std::string labels(const Frame& f, const Dot& smallest, int64_t bytes) {
  const double x = f.x(smallest.peak), y = f.y(smallest.time) - 7;
  const std::string text = fmt::format("smallest budget: {}, {:.1f} %", bytes_text(bytes), 100 * smallest.peak);
  Label budget(text, x, y, false);
  if (budget.to > f.right) budget = Label(text, x, y, true);
  Label original("the original", f.x(1), f.y(1) - 8, true);
  if (original.touches(budget)) original.y = f.y(1) + 18;
  return budget.svg() + original.svg();
}

}  // namespace

std::string front_svg(const std::string& title, const PlanFront& front) {
  const auto& points = front.points;
  const auto& original = front.original;
  std::vector<Dot> dots;
  for (const PlanPoint& p : points)
    dots.push_back({static_cast<double>(p.predicted_peak_bytes) / static_cast<double>(original.peak_bytes),
                    p.predicted_seconds / original.seconds});
  const Frame f(dots);
  std::string out = svg_head(kWidth, kHeight);
  out += fmt::format("<text x='{}' y='28' class='title'>{}</text>\n", f.left,
                     svg_text(shortened(title, (kWidth - f.left) * 11.5 / 15, true)));
  out += fmt::format("<text x='{}' y='47'>the original: peak {}, a step {}</text>\n", f.left,
                     bytes_text(original.peak_bytes), seconds_text(original.seconds));
  out += axes(f);
  // Between two points the left one is the plan to take.
  std::string path = fmt::format("M{:.1f} {}", f.x(dots.front().peak), f.top);
  for (const Dot& d : dots) path += fmt::format("L{:.1f} {:.1f}", f.x(d.peak), f.y(d.time));
  out += fmt::format("<path d='{}' fill='none' stroke='#4e79a7' stroke-width='1.6'/>\n", path);
  for (size_t i = 0; i < dots.size(); ++i)
    out += fmt::format(
        "<circle cx='{:.1f}' cy='{:.1f}' r='4' fill='#4e79a7'><title>budget {}: peak {}, a step {}, run again {:.2f} "
        "GFLOP</title></circle>\n",
        f.x(dots[i].peak), f.y(dots[i].time), bytes_text(points[i].budget), bytes_text(points[i].predicted_peak_bytes),
        seconds_text(points[i].predicted_seconds), points[i].recomputed_flops / 1e9);
  out += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='5' class='peak'/>\n", f.x(1), f.y(1));
  return out + labels(f, dots.front(), points.front().predicted_peak_bytes) + "</svg>\n";
}

}  // namespace tsmem::cli
