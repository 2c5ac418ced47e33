#include "cli/timeline_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace tsmem::cli {

std::string parent(const std::string& path) {
  auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

namespace {

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

}  // namespace

std::vector<std::string> groups_of(const std::vector<TitledProfile>& profiles) {
  const auto weight = weights(profiles);
  std::map<std::string, std::vector<std::string>> children;
  for (auto& [path, bytes] : weight)
    if (!path.empty() && bytes > 0) children[parent(path)].push_back(path);
  std::set<std::string> groups{""}, split;
  while (groups.size() < kColors.size()) {
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
      if (groups.size() < kColors.size()) groups.insert(child);
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

std::string shown(const std::string& group) { return group.empty() ? "(model)" : group; }

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

double end_of(const Profile& p) { return p.timeline.empty() ? 0 : p.timeline.back().t; }

}  // namespace tsmem::cli
