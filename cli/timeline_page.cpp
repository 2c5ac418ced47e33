// A profile as a page: what cli/page/chart.js and cli/page/modules.js draw.
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/page.h"
#include "cli/timeline.h"
#include "cli/timeline_groups.h"

namespace tsmem::cli {
namespace {

using nlohmann::json;

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

std::string timeline_html(const std::vector<TitledProfile>& profiles) {
  return page("tsmem profile", {kChartScript, kModulesScript}, page_data(profiles));
}

}  // namespace tsmem::cli
