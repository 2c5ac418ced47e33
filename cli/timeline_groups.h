// The modules that a profile's pictures tell apart, and what they say of its moments.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/timeline.h"

namespace tsmem::cli {

// Far apart for neighbours, also for most colour-blind readers; a colour a group.
constexpr std::array<const char*, 14> kColors = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
                                                 "#edc948", "#b07aa1", "#9c755f", "#a0cbe8", "#ffbe7d",
                                                 "#8cd17d", "#ff9d9a", "#d4a6c8", "#86bcb6"};

// From the model downwards, the heaviest module is split into its children for as long as there are colours. In the
// order in which they first allocate.
std::vector<std::string> groups_of(const std::vector<TitledProfile>& profiles);

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

// A module's path as pictures write it.
std::string shown(const std::string& path);

// Where the peak is: phase, module, operator.
std::string peak_place(const Profile& p);

// When backward begins, in seconds.
std::optional<double> backward_start(const Profile& p);

// How long the recorded step was, in seconds.
double end_of(const Profile& p);

}  // namespace tsmem::cli
