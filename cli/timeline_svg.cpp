// A profile as a still picture.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/run_options.h"
#include "cli/svg.h"
#include "cli/timeline.h"
#include "cli/timeline_groups.h"

namespace tsmem::cli {
namespace {

constexpr size_t kColumns = 900;  // points along the time axis

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// One unit for all of a picture.
std::string mib_text(int64_t bytes) { return fmt::format("{:.{}f} MiB", mib(bytes), mib(bytes) < 100 ? 1 : 0); }

struct Point {
  double t;  // seconds
  std::vector<int64_t> live;
};

// Of each of `columns` equal parts of `seconds`, the moment with the most live bytes: the peak is always among them.
std::vector<Point> samples(const Profile& p, const std::vector<std::string>& groups, double seconds) {
  GroupOf group(groups);
  std::vector<Point> points;
  std::vector<int64_t> live(groups.size());
  int64_t total = 0, most = 0;
  size_t column = static_cast<size_t>(-1);
  for (auto& e : p.timeline) {
    live[group(e.module)] += e.bytes;
    total += e.bytes;
    const size_t at =
        std::min(kColumns - 1, static_cast<size_t>(e.t / std::max(seconds, 1e-9) * static_cast<double>(kColumns)));
    if (at != column) {
      column = at;
      most = total;
      points.push_back({e.t, live});
    } else if (total > most) {
      most = total;
      points.back() = {e.t, live};
    }
  }
  if (!p.timeline.empty()) points.push_back({p.timeline.back().t, live});
  return points;
}

struct Canvas {
  double width = 1180, left = 78, plot_width = 840, plot_height = 300, panel_height = 396;
  double seconds, bytes;
  double x(double t) const { return left + t / seconds * plot_width; }
  double y(double top, double b) const { return top + plot_height * (1 - b / bytes); }
};

// What the colours and the grey stand for, from the top of the stack down.
std::string keys(const Canvas& c, double top, const std::vector<std::string>& groups, bool backward) {
  const double left = c.left + c.plot_width + 16, room = c.width - left - 24;
  double y = top + 4;
  std::string out;
  const auto key = [&](const std::string& paint, const std::string& text) {
    out += fmt::format("<rect x='{}' y='{}' width='12' height='12' {}/><text x='{}' y='{}'>{}</text>\n", left, y, paint,
                       left + 18, y + 10.5, svg_text(shortened(text, room)));
    y += 18;
  };
  for (size_t g = groups.size(); g-- > 0;) key(fmt::format("fill='{}'", kColors[g]), shown(groups[g]));
  if (backward) key("class='shade'", "grey: backward runs");
  return out;
}

std::string panel(const Canvas& c, double top, const TitledProfile& titled, const std::vector<std::string>& groups) {
  const Profile& p = *titled.profile;
  const double bottom = top + c.plot_height, right = c.left + c.plot_width;
  std::string out = fmt::format("<text x='{}' y='{}' class='title'>{}</text>\n", c.left, top - 30,
                                svg_text(shortened(titled.title, (c.width - c.left) * 11.5 / 15, true)));
  out += fmt::format("<text x='{}' y='{}'>peak {}, saved for backward {}, the recorded step took {}</text>\n", c.left,
                     top - 11, mib_text(p.peak_bytes), mib_text(p.saved_bytes), seconds_text(end_of(p)));
  const auto backward = backward_start(p);
  if (backward)
    out += fmt::format("<rect x='{:.1f}' y='{}' width='{:.1f}' height='{}' class='shade'/>\n", c.x(*backward), top,
                       c.x(end_of(p)) - c.x(*backward), c.plot_height);
  const double step = mark_step(mib(static_cast<int64_t>(c.bytes)), 5);
  for (double v = 0; v <= mib(static_cast<int64_t>(c.bytes)); v += step)
    out += fmt::format(
        "<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' class='grid'/><text x='{3}' y='{4:.1f}' class='end'>{5} MiB"
        "</text>\n",
        c.left, right, c.y(top, v * (1 << 20)), c.left - 6, c.y(top, v * (1 << 20)) + 4, mark_text(v));
  const double time_step = mark_step(c.seconds * 1e3, 8);
  for (double v = 0; v <= c.seconds * 1e3; v += time_step)
    out += fmt::format("<text x='{:.1f}' y='{}' class='middle'>{}{}</text>\n", c.x(v / 1e3), bottom + 20, mark_text(v),
                       v == 0 ? " ms" : "");
  // From the top of the stack down, each area over those below it.
  const auto points = samples(p, groups, c.seconds);
  for (size_t g = groups.size(); g-- > 0;) {
    std::string path;
    double last = -1;
    bool any = false;
    for (auto& point : points) {
      double sum = 0;
      for (size_t k = 0; k <= g; ++k) sum += static_cast<double>(std::max<int64_t>(point.live[k], 0));
      any |= point.live[g] > 0;
      const double y = c.y(top, sum);
      if (y == last) continue;
      path += fmt::format("H{:.1f}V{:.1f}", c.x(point.t), y);
      last = y;
    }
    if (any)
      out += fmt::format("<path d='M{} {}{}H{:.1f}V{}Z' fill='{}'><title>{}</title></path>\n", c.left, bottom, path,
                         c.x(end_of(p)), bottom, kColors[g], svg_text(shown(groups[g])));
  }
  if (backward) {
    const double x = c.x(*backward);
    out += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' class='mark'/>\n", x, top, bottom);
    out += fmt::format("<text x='{:.1f}' y='{}' class='end'>forward</text><text x='{:.1f}' y='{}'>backward</text>\n",
                       std::max(x, text_width("forward")) - 5, bottom + 37, x + 5, bottom + 37);
  }
  if (p.peak_event >= 0) {
    const auto& e = p.timeline[static_cast<size_t>(p.peak_event)];
    const double x = c.x(e.t), y = c.y(top, static_cast<double>(p.peak_bytes));
    const bool flip = x > c.left + c.plot_width / 2;
    const double room = flip ? x - 12 - c.left : right - 12 - x;
    out += fmt::format(
        "<circle cx='{:.1f}' cy='{:.1f}' r='4' class='peak'/><text x='{:.1f}' y='{:.1f}' class='{}'>{}</text>\n", x, y,
        flip ? x - 8 : x + 8, std::max(y - 6, top + 10), flip ? "end halo" : "halo",
        svg_text(shortened(mib_text(p.peak_bytes) + ": " + peak_place(p), room, true)));
  }
  return out + keys(c, top, groups, backward.has_value());
}

}  // namespace

std::string timeline_svg(const std::vector<TitledProfile>& profiles) {
  const auto groups = groups_of(profiles);
  Canvas c{.seconds = 1e-9, .bytes = 1};
  for (auto& [_, p] : profiles) {
    c.seconds = std::max(c.seconds, end_of(*p));
    c.bytes = std::max(c.bytes, 1.06 * static_cast<double>(p->peak_bytes));
  }
  const double height = 20 + c.panel_height * static_cast<double>(profiles.size());
  std::string out = svg_head(c.width, height);
  double top = 62;
  for (auto& titled : profiles) {
    out += panel(c, top, titled, groups);
    top += c.panel_height;
  }
  return out + "</svg>\n";
}

}  // namespace tsmem::cli
