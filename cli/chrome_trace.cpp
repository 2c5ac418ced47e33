// A profile for chrome://tracing and ui.perfetto.dev.
#include <nlohmann/json.hpp>

#include "cli/timeline.h"
#include "cli/timeline_groups.h"

namespace tsmem::cli {

std::string chrome_trace(const std::vector<TitledProfile>& profiles) {
  const auto groups = groups_of(profiles);
  using nlohmann::json;
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

}  // namespace tsmem::cli
