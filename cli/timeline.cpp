#include "cli/timeline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/cli.h"
#include "cli/page.h"
#include "cli/run_options.h"
#include "rewriter/error.h"

extern char** environ;

namespace tsmem::cli {

std::string parent(const std::string& path) {
  auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

namespace {

using nlohmann::json;

constexpr size_t kGroups = 14;    // modules told apart by colour
constexpr size_t kColumns = 900;  // points along the time axis of a still picture

// Far apart for neighbours, also for most colour-blind readers.
const char* const kColors[kGroups] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1",
                                      "#9c755f", "#a0cbe8", "#ffbe7d", "#8cd17d", "#ff9d9a", "#d4a6c8", "#86bcb6"};

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// One unit for all of a picture.
std::string mib_text(int64_t bytes) { return fmt::format("{:.{}f} MiB", mib(bytes), mib(bytes) < 100 ? 1 : 0); }

// Live bytes by module when the step is at its peak, and what each keeps for backward.
std::map<std::string, int64_t> weights(const std::vector<TitledProfile>& profiles) {
  std::map<std::string, int64_t> sums;
  for (auto& [_, p] : profiles) {
    std::map<std::string, int64_t> own;
    for (int64_t i = 0; i <= p->peak_event; ++i) own[p->timeline[i].module] += p->timeline[i].bytes;
    for (auto& m : p->modules) own[m.path] += m.saved_bytes;
    for (auto& [path, bytes] : own)
      for (auto at = path;; at = parent(at)) {
        sums[at] += std::max<int64_t>(bytes, 0);
        if (at.empty()) break;
      }
  }
  return sums;
}

// The modules that the picture tells apart: from the model downwards, the heaviest is split into its children for as
// long as there are colours. In the order in which they first allocate.
std::vector<std::string> groups_of(const std::vector<TitledProfile>& profiles) {
  const auto weight = weights(profiles);
  std::map<std::string, std::vector<std::string>> children;
  for (auto& [path, bytes] : weight)
    if (!path.empty() && bytes > 0) children[parent(path)].push_back(path);
  std::set<std::string> groups{""}, split;
  while (groups.size() < kGroups) {
    std::string heaviest;
    int64_t most = 0;
    for (auto& g : groups)
      if (!split.contains(g) && children.contains(g) && weight.at(g) > most) {
        heaviest = g;
        most = weight.at(g);
      }
    if (most == 0) break;
    split.insert(heaviest);
    auto& inner = children[heaviest];  // the heaviest as far as there are colours, the others stay with the module
    std::stable_sort(inner.begin(), inner.end(), [&](auto& a, auto& b) { return weight.at(a) > weight.at(b); });
    for (auto& child : inner)
      if (groups.size() < kGroups) groups.insert(child);
  }
  std::vector<std::string> order;
  for (auto& [_, p] : profiles)
    for (auto& e : p->timeline) {
      auto g = e.module;
      while (!groups.contains(g)) g = parent(g);
      if (std::find(order.begin(), order.end(), g) == order.end()) order.push_back(g);
    }
  return order;
}

// Of each module, the group that it is in.
class GroupOf {
 public:
  explicit GroupOf(const std::vector<std::string>& groups) {
    for (size_t i = 0; i < groups.size(); ++i) index_[groups[i]] = i;
  }
  size_t operator()(const std::string& module) {
    for (auto at = module;; at = parent(at)) {
      if (auto it = index_.find(at); it != index_.end()) return index_[module] = it->second;
      if (at.empty()) return 0;
    }
  }

 private:
  std::map<std::string, size_t> index_;
};

struct Point {
  double t;  // seconds
  std::vector<int64_t> live;
};

double end_of(const Profile& p) { return p.timeline.empty() ? 0 : p.timeline.back().t; }

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

}  // namespace

std::string svg_text(const std::string& text) {
  std::string out;
  for (char c : text)
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  return out;
}

std::string svg_head(double width, double height) {
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' viewBox='0 0 {0} {1}' "
      "font-family='DejaVu Sans, Verdana, sans-serif' font-size='11.5'>\n"
      "<style>.title{{font-size:15px;font-weight:bold}}.end{{text-anchor:end}}.middle{{text-anchor:middle}}"
      ".grid{{stroke:#ddd}}.mark{{stroke:#555;stroke-dasharray:4 3}}.peak{{fill:#fff;stroke:#000;stroke-width:2}}"
      ".halo{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round;font-weight:bold}}</style>\n"
      "<rect width='{0}' height='{1}' fill='#fff'/>\n",
      width, height);
}

namespace {

std::string shown(const std::string& group) { return group.empty() ? "(model)" : group; }

// 1, 2 or 5 times a power of ten, so that about `count` of them make `range`.
double step_of(double range, int count) {
  const double rough = range / count, power = std::pow(10, std::floor(std::log10(rough)));
  for (double m : {1., 2., 5.})
    if (rough <= m * power) return m * power;
  return 10 * power;
}

std::string number(double v) { return fmt::format("{:.6g}", v); }

// The sentence on the peak, and the first event of backward; -1 where there is none.
std::string peak_place(const Profile& p) {
  auto& e = p.timeline[static_cast<size_t>(p.peak_event)];
  return fmt::format("{}, {}{}{}", e.backward ? "backward" : "forward", shown(e.module), e.op.empty() ? "" : ", ",
                     e.op);
}

std::optional<double> backward_start(const Profile& p) {
  for (auto& e : p.timeline)
    if (e.backward) return e.t;
  return std::nullopt;
}

struct Canvas {
  double width = 1180, left = 78, plot_width = 840, plot_height = 300, panel_height = 396;
  double seconds, bytes;
  double x(double t) const { return left + t / seconds * plot_width; }
  double y(double top, double b) const { return top + plot_height * (1 - b / bytes); }
};

std::string panel(const Canvas& c, double top, const TitledProfile& titled, const std::vector<std::string>& groups) {
  const Profile& p = *titled.profile;
  const double bottom = top + c.plot_height, right = c.left + c.plot_width;
  std::string out =
      fmt::format("<text x='{}' y='{}' class='title'>{}</text>\n", c.left, top - 30, svg_text(titled.title));
  out += fmt::format("<text x='{}' y='{}'>peak {}, saved for backward {}, the recorded step took {}</text>\n", c.left,
                     top - 11, mib_text(p.peak_bytes), mib_text(p.saved_bytes), seconds_text(end_of(p)));
  const auto backward = backward_start(p);
  if (backward)
    out += fmt::format("<rect x='{:.1f}' y='{}' width='{:.1f}' height='{}' fill='#f1f1f1'/>\n", c.x(*backward), top,
                       c.x(end_of(p)) - c.x(*backward), c.plot_height);
  const double step = step_of(mib(static_cast<int64_t>(c.bytes)), 5);
  for (double v = 0; v <= mib(static_cast<int64_t>(c.bytes)); v += step)
    out += fmt::format(
        "<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' class='grid'/><text x='{3}' y='{4:.1f}' class='end'>{5} MiB"
        "</text>\n",
        c.left, right, c.y(top, v * (1 << 20)), c.left - 6, c.y(top, v * (1 << 20)) + 4, number(v));
  const double time_step = step_of(c.seconds * 1e3, 8);
  for (double v = 0; v <= c.seconds * 1e3; v += time_step)
    out += fmt::format("<text x='{:.1f}' y='{}' class='middle'>{}{}</text>\n", c.x(v / 1e3), bottom + 17, number(v),
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
  const double limit = right - 8;
  if (backward) {
    const double x = c.x(*backward);
    out += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' class='mark'/>\n", x, top, bottom);
    out += fmt::format("<text x='{:.1f}' y='{}' class='end'>forward</text><text x='{:.1f}' y='{}'>backward</text>\n",
                       x - 5, bottom + 33, x + 5, bottom + 33);
  }
  if (p.peak_event >= 0) {
    const auto& e = p.timeline[static_cast<size_t>(p.peak_event)];
    const double x = c.x(e.t), y = c.y(top, static_cast<double>(p.peak_bytes));
    const bool flip = x > c.left + c.plot_width / 2;
    out += fmt::format(
        "<circle cx='{0:.1f}' cy='{1:.1f}' r='4' class='peak'/><text x='{2:.1f}' y='{3:.1f}' class='{4}'>{5}: "
        "{6}</text>\n",
        x, y, std::min(flip ? x - 8 : x + 8, limit), std::max(y - 6, top + 10), flip ? "end halo" : "halo",
        mib_text(p.peak_bytes), svg_text(peak_place(p)));
  }
  double key = top + 4;
  for (size_t g = groups.size(); g-- > 0; key += 20)
    out += fmt::format("<rect x='{}' y='{}' width='12' height='12' fill='{}'/><text x='{}' y='{}'>{}</text>\n",
                       right + 16, key, kColors[g], right + 34, key + 10.5, svg_text(shown(groups[g])));
  return out;
}

json page_data(const std::vector<TitledProfile>& profiles) {
  const auto groups = groups_of(profiles);
  GroupOf group(groups);
  json data = {{"groups", json::array()}, {"colors", json::array()}, {"profiles", json::array()}};
  for (size_t g = 0; g < groups.size(); ++g) {
    data["groups"].push_back(shown(groups[g]));
    data["colors"].push_back(kColors[g]);
  }
  for (auto& [title, p] : profiles) {
    std::map<std::string, size_t> names;
    auto index = [&](const std::string& name) { return names.try_emplace(name, names.size()).first->second; };
    json t = json::array(), bytes = json::array(), at = json::array(), module = json::array(), op = json::array();
    for (auto& e : p->timeline) {
      t.push_back(std::round(e.t * 1e6));
      bytes.push_back(e.bytes);
      at.push_back(group(e.module));
      module.push_back(index(shown(e.module)));
      op.push_back(index(e.op));
    }
    std::vector<std::string> words(names.size());
    for (auto& [name, i] : names) words[i] = name;
    json modules = json::array();
    for (auto& m : p->modules)
      modules.push_back({m.path, m.type, m.saved_bytes, m.forward_bytes, m.backward_bytes,
                         std::round((m.forward_seconds + m.backward_seconds) * 1e6)});
    const auto backward = backward_start(*p);
    data["profiles"].push_back({{"title", title},
                                {"peak", p->peak_bytes},
                                {"saved", p->saved_bytes},
                                {"step", p->step_seconds},
                                {"backward", backward ? json(std::round(*backward * 1e6)) : json()},
                                {"place", p->peak_event >= 0 ? peak_place(*p) : ""},
                                {"t", t},
                                {"bytes", bytes},
                                {"group", at},
                                {"module", module},
                                {"op", op},
                                {"names", words},
                                {"modules", modules}});
  }
  return data;
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

std::string timeline_html(const std::vector<TitledProfile>& profiles) {
  return page("tsmem profile", kTimelineScript, page_data(profiles));
}

std::string chrome_trace(const std::vector<TitledProfile>& profiles) {
  const auto groups = groups_of(profiles);
  json events = json::array();
  for (size_t i = 0; i < profiles.size(); ++i) {
    auto& [title, p] = profiles[i];
    const auto pid = i + 1;
    const auto name = [&](const char* what, int tid, const std::string& text) {
      events.push_back({{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", text}}}});
    };
    name("process_name", 0, title);
    name("thread_name", 1, "forward");
    name("thread_name", 2, "backward");
    for (auto& s : p->spans)
      events.push_back({{"ph", "X"},
                        {"name", s.op},
                        {"cat", s.backward ? "backward" : "forward"},
                        {"pid", pid},
                        {"tid", s.backward ? 2 : 1},
                        {"ts", s.t * 1e6},
                        {"dur", s.seconds * 1e6},
                        {"args", {{"module", shown(s.module)}}}});
    GroupOf group(groups);
    std::vector<int64_t> live(groups.size());
    for (auto& e : p->timeline) {
      live[group(e.module)] += e.bytes;
      json values = json::object();
      for (size_t g = 0; g < groups.size(); ++g) values[shown(groups[g])] = live[g];
      events.push_back({{"ph", "C"}, {"name", "live bytes"}, {"pid", pid}, {"ts", e.t * 1e6}, {"args", values}});
    }
  }
  return json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump(-1, ' ', false, json::error_handler_t::replace) +
         "\n";
}

static Error no_png(const std::string& why) { return Error(ErrorKind::input, "Can't draw a PNG: " + why); }

static const char* const kNoProgram =
    "the program rsvg-convert is not installed (Debian: librsvg2-bin); .svg and .html need nothing.";

void require_png() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/rsvg-convert").c_str(), X_OK) == 0) return;
  throw no_png(kNoProgram);
}

std::string png_of(const std::string& svg) {
  const auto fail = no_png;
  // Both through files without a name: a pipe each way would need two threads.
  const int in = memfd_create("svg", MFD_CLOEXEC), out = memfd_create("png", MFD_CLOEXEC);
  struct Closer {
    int a, b;
    ~Closer() {
      if (a >= 0) close(a);
      if (b >= 0) close(b);
    }
  } closer{in, out};
  if (in < 0 || out < 0) throw fail(fmt::format("{}.", std::strerror(errno)));
  for (size_t at = 0; at < svg.size();) {
    const ssize_t n = write(in, svg.data() + at, svg.size() - at);
    if (n < 0) throw fail(fmt::format("{}.", std::strerror(errno)));
    at += static_cast<size_t>(n);
  }
  lseek(in, 0, SEEK_SET);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in, 0);
  posix_spawn_file_actions_adddup2(&files, out, 1);
  const char* const arguments[] = {"rsvg-convert", "--zoom=2", "--format=png", nullptr};
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, arguments[0], &files, nullptr, const_cast<char**>(arguments), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error == ENOENT) throw fail(kNoProgram);
  if (error != 0) throw fail(fmt::format("rsvg-convert: {}.", std::strerror(error)));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw fail("rsvg-convert failed.");
  std::string png(static_cast<size_t>(lseek(out, 0, SEEK_END)), '\0');
  lseek(out, 0, SEEK_SET);
  for (size_t at = 0; at < png.size();) {
    const ssize_t n = read(out, png.data() + at, png.size() - at);
    if (n <= 0) throw fail("rsvg-convert's output can't be read.");
    at += static_cast<size_t>(n);
  }
  return png;
}

}  // namespace tsmem::cli
