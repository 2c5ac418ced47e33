#include "rewriter/plan/choice.h"

#include <algorithm>
#include <map>
#include <utility>

#include "rewriter/plan/milp.h"

namespace tsmem {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// How long one solve may take where nobody says: most choices are within 1 % of the best by then.
constexpr double kSolveSeconds = 2;

// Of a second on the link: nothing is offloaded for nothing.
constexpr double kLinkCost = 1e-3;

// Sizes that the solver can do in seconds.
constexpr size_t kMostColumns = 12000, kMostCells = 4'000'000;

// The program of a step: a column for every open site (1: recomputed) and one for those that may be offloaded (1: it
// is), one for every value and slot in which it may have to be there (1: it is), without a budget one for the peak, and
// two for what is waited for on the link.
class Program {
 public:
  Program(const StepModel& model, std::optional<double> budget) : model_(model) {
    const size_t slots = model.slots.size();
    // The smallest peak does not depend on how long anything takes today.
    for (const auto& s : model.sites)
      site.push_back(s.open ? milp.add(0, 1, budget ? s.seconds : 1e-3 * s.flops / kFlopsPerSecond, true) : -1);
    const double cost = budget ? 1 : 1e-3;  // of a second
    for (const auto& s : model.sites)
      offload.push_back(s.open && s.link_seconds > 0 ? milp.add(0, 1, cost * kLinkCost * s.link_seconds, true) : -1);
    for (size_t s = 0; s < site.size(); ++s)
      if (offload[s] >= 0) milp.rows.push_back({{{site[s], 1}, {offload[s], 1}}, 1});
    limit_link(cost);
    const int peak = budget ? -1 : milp.add(0, 1e15, 1, false);
    terms_.resize(slots);
    for (const auto& slot : model.slots) constant_.push_back(static_cast<double>(slot.peak + slot.correction) / kMiB);
    // Long chains of what is recomputed from each other are left out where there would be too many columns.
    const size_t window = std::max<size_t>(4, kMostColumns / std::max<size_t>(1, model.values.size()));
    const auto need = needs(model, {}, window);
    there_.resize(model.values.size());
    for (size_t i = model.values.size(); i-- > 0;) {
      if (!model.values[i].fixed) {
        add_columns(i, need[i]);
        add_rows(i);
        add_rows_of_window(i);
      }
      if (is_choice(model.values[i])) add_bytes(i);
    }
    limit_bytes(budget, peak);
  }

  Milp milp;
  std::vector<int> site, offload;  // columns; -1: not open

 private:
  using Value = StepModel::Value;

  static bool is_choice(const Value& v) { return !v.fixed && v.site >= 0; }

  int offload_of(const Value& v) const { return v.fixed || v.site < 0 ? -1 : offload[v.site]; }

  // What copies take beyond forward, and beyond backward, is waited for.
  void limit_link(double cost) {
    const double forward = model_.forward * model_.seconds;
    for (const double beside : {forward, model_.seconds - forward}) {
      Milp::Row row{{}, beside};
      for (size_t s = 0; s < offload.size(); ++s)
        if (offload[s] >= 0) row.entries.emplace_back(offload[s], model_.sites[s].link_seconds);
      if (row.entries.empty()) return;
      row.entries.emplace_back(milp.add(0, 1e15, cost, false), -1);
      milp.rows.push_back(std::move(row));
    }
  }

  // The columns that say whether a value is there. -1: it must be, whatever is chosen.
  void add_columns(size_t i, const std::vector<char>& need) {
    const Value& v = model_.values[i];
    const size_t slots = model_.slots.size(), first = model_.first_backward;
    const size_t sure = v.read_in.empty() ? slots : static_cast<size_t>(v.read_in.front());
    for (size_t t = first; t < slots; ++t) {
      if (!need[t - first]) continue;
      if (v.expensive ? t >= sure : std::binary_search(v.read_in.begin(), v.read_in.end(), static_cast<int>(t)))
        there_[i][t] = -1;
      else
        there_[i][t] = milp.add(0, 1, 0, false);
    }
  }

  void add_rows(size_t i) {
    const Value& v = model_.values[i];
    auto& own = there_[i];
    for (auto it = own.begin(); it != own.end(); ++it) {
      if (it->second < 0) continue;
      // Once recomputed, an expensive one stays; and a kept one is there.
      if (v.expensive && it != own.begin())
        if (const int before = std::prev(it)->second; before >= 0)
          milp.rows.push_back({{{before, 1}, {it->second, -1}}, 0});
      if (v.expensive && v.site >= 0) {
        Milp::Row row{{{site[v.site], -1}, {it->second, -1}}, -1};
        if (const int o = offload_of(v); o >= 0) {
          row.entries.emplace_back(o, -1);
          if (is_there(model_, v, it->first)) milp.rows.push_back({{{o, 1}, {it->second, -1}}, 0});
        }
        milp.rows.push_back(std::move(row));
      }
      for (const int w : v.users) {
        const Value& user = model_.values[w];
        const auto needed = there_[w].find(it->first);
        if (user.fixed || needed == there_[w].end()) continue;
        // there(user) + recomputed(user) - 1 <= there(v)
        Milp::Row row{{{it->second, -1}}, 0};
        if (needed->second >= 0)
          row.entries.emplace_back(needed->second, 1);
        else
          row.limit -= 1;
        if (user.site >= 0) {
          row.entries.emplace_back(site[user.site], 1);
          row.limit += 1;
        }
        milp.rows.push_back(std::move(row));
      }
    }
  }

  // Where the window ends: not recomputed there, so whoever is recomputed from it is kept, or it is itself.
  void add_rows_of_window(size_t i) {
    const Value& v = model_.values[i];
    for (const int w : v.users) {
      const Value& user = model_.values[w];
      if (user.fixed) continue;
      for (const auto& [t, column] : there_[w]) {
        if (there_[i].count(t) || t >= static_cast<size_t>(v.end)) continue;
        Milp::Row row{{}, -1};
        const auto add = [&](int c) {
          if (c >= 0) row.entries.emplace_back(c, 1);
          if (c >= 0) row.limit += 1;
        };
        add(column);
        add(user.site >= 0 ? site[user.site] : -1);
        if (v.site >= 0 && (user.site < 0 || site[user.site] != site[v.site])) add(site[v.site]);
        if (!row.entries.empty()) milp.rows.push_back(std::move(row));
      }
    }
  }

  // What the choice of a value changes in the bytes of each slot.
  void add_bytes(size_t i) {
    const Value& v = model_.values[i];
    const double mib = static_cast<double>(v.bytes) / kMiB;
    const int recomputed = site[v.site], offloaded = offload_of(v);
    const auto add = [&](size_t t, int column, double bytes) {
      if (column >= 0) terms_[t].emplace_back(column, bytes);
    };
    for (size_t t = 0; t < model_.slots.size(); ++t) {
      const bool forward = t < model_.first_backward, ended = t >= static_cast<size_t>(v.end);
      if (forward && model_.slots[t].at <= v.last_forward) continue;
      const bool there = offloaded >= 0 && is_there(model_, v, t);
      if (!v.expensive) {
        // An offloaded one may stay longer than a kept one.
        if (!ended) {
          constant_[t] += mib;
          add(t, recomputed, -mib);
        }
        if (!ended && !there) add(t, offloaded, -mib);
        if (ended && there) add(t, offloaded, mib);
      } else if (ended) {
        break;
      } else if (const auto it = there_[i].find(t); forward || it == there_[i].end()) {
        add(t, recomputed, -mib);
        if (!there) add(t, offloaded, -mib);
      } else if (it->second >= 0) {
        constant_[t] -= mib;
        add(t, it->second, mib);
      }
    }
  }

  // No slot needs more than the budget, or than the peak that is looked for.
  void limit_bytes(std::optional<double> budget, int peak) {
    const size_t slots = model_.slots.size();
    const size_t most_rows = std::clamp<size_t>(kMostCells / std::max<size_t>(1, milp.columns.size()), 100, 600);
    const size_t group = (slots + most_rows - 1) / most_rows;
    for (size_t t = 0; t < slots; ++t) {
      // Of a very long step the highest slot of each group.
      const size_t begin = t / group * group, end = std::min(begin + group, slots);
      if (std::max_element(&constant_[begin], &constant_[0] + end) != &constant_[t]) continue;
      std::map<int, double> sum;
      for (const auto& [column, coefficient] : terms_[t]) sum[column] += coefficient;
      if (!budget) sum[peak] -= 1;
      milp.rows.push_back({{sum.begin(), sum.end()}, (budget ? *budget / kMiB : 0) - constant_[t]});
    }
  }

  const StepModel& model_;
  std::vector<std::map<size_t, int>> there_;                // of each value: slot -> column
  std::vector<std::vector<std::pair<int, double>>> terms_;  // of each slot's bytes, in MiB: column, coefficient
  std::vector<double> constant_;
};

// The solver's answer, from a choice to begin with. `seconds`: its time where the limits have none, for a small
// program. `gap`: as a cost.
MilpSolution solve_from(const Program& program, const Choice& begin, const SolverLimits& limits, double seconds,
                        double gap) {
  const size_t columns = program.milp.columns.size();
  if (columns >= 2 * kMostColumns) return {};
  std::vector<double> first(columns);
  for (size_t s = 0; s < begin.size(); ++s) {
    if (program.site[s] >= 0) first[program.site[s]] = begin[s] == Fate::recompute;
    if (program.offload[s] >= 0) first[program.offload[s]] = begin[s] == Fate::offload;
  }
  const double size = std::max(1.0, static_cast<double>(columns) / 6000);
  return solve(program.milp, limits.seconds > 0 ? limits.seconds : seconds * size, gap, first);
}

// The solver's choice. What it left open is as in `begin`.
PlanChoice solved_choice(const StepModel& model, const Program& program, const MilpSolution& solution, Choice begin) {
  const auto chosen = [&](int column) { return column >= 0 && solution.values[column] > 0.5; };
  for (size_t s = 0; s < begin.size(); ++s)
    if (program.site[s] >= 0)
      begin[s] = chosen(program.site[s]) ? Fate::recompute : chosen(program.offload[s]) ? Fate::offload : Fate::keep;
  return {std::move(begin), solution.gap / model.seconds, true};
}

// Without an answer nothing is known but that recomputing something takes time.
PlanChoice unsolved_choice(const StepModel& model, Choice choice) {
  const Choice nothing(model.sites.size());
  const double gap = (predicted_seconds(model, choice) - predicted_seconds(model, nothing)) / model.seconds;
  return {std::move(choice), gap, false};
}

}  // namespace

std::optional<PlanChoice> fastest_choice(const StepModel& model, double budget, const Choice& known,
                                         const SolverLimits& limits) {
  const Program program(model, budget);
  Choice begin = greedy_choice(model, budget);
  if (!known.empty() && predicted_seconds(model, known) < predicted_seconds(model, begin)) begin = known;
  const MilpSolution s = solve_from(program, begin, limits, kSolveSeconds, limits.gap * model.seconds);
  if (s.infeasible) return std::nullopt;
  return s.found ? solved_choice(model, program, s, begin) : unsolved_choice(model, begin);
}

std::optional<PlanChoice> smallest_choice(const StepModel& model, const Choice& begin, const SolverLimits& limits) {
  const Program program(model, std::nullopt);
  const Choice first = begin.empty() ? greedy_choice(model, 0) : begin;
  int64_t peak = 0;
  for (const auto& slot : model.slots) peak = std::max(peak, slot.peak);
  const double gap = limits.gap * static_cast<double>(peak) / kMiB;
  const MilpSolution s = solve_from(program, first, limits, kSolveSeconds * (begin.empty() ? 2 : 1), gap);
  if (s.infeasible) return std::nullopt;
  return s.found ? solved_choice(model, program, s, first) : unsolved_choice(model, greedy_choice(model, 0));
}

}  // namespace tsmem
