#include "rewriter/plan/step_model.h"

#include <algorithm>
#include <utility>

namespace tsmem {

using Value = StepModel::Value;
using Site = StepModel::Site;

int add_value(StepModel& model, Value value) {
  const int index = static_cast<int>(model.values.size());
  value.last_forward = index;
  for (const int o : value.operands) {
    model.values[o].users.push_back(index);
    model.values[o].last_forward = index;
  }
  model.values.push_back(std::move(value));
  return index;
}

// Until when values are there, and how often each would be recomputed. Users come after their operands.
static std::vector<size_t> set_ends(StepModel& model) {
  auto& values = model.values;
  std::vector<int> own_backward(values.size(), -1);  // the first slot of each value's own layer
  for (size_t t = model.slots.size(); t-- > model.first_backward + 1;)
    if (const int at = model.slots[t].at; static_cast<size_t>(at) < values.size())
      own_backward[at] = static_cast<int>(t);
  std::vector<int> last_need(values.size(), -1);
  std::vector<size_t> times(values.size());
  for (size_t i = values.size(); i-- > 0;) {
    Value& v = values[i];
    times[i] += v.read_in.size();
    if (!v.read_in.empty()) last_need[i] = std::max(last_need[i], v.read_in.back());
    for (const int o : v.operands) {
      if (!v.expensive) times[o] += times[i];
      if (!v.expensive && !v.fixed) last_need[o] = std::max(last_need[o], last_need[i]);
    }
    v.end = last_need[i] + 1;
    // An expensive one stays until its own backward.
    if (v.expensive && own_backward[i] >= 0) v.end = own_backward[i];
  }
  return times;
}

void complete(StepModel& model) {
  const std::vector<size_t> times = set_ends(model);
  const auto& values = model.values;
  std::vector<double> chain(values.size());  // seconds to compute a cheap value from expensive ones
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& v = values[i];
    double operands = 0;
    for (const int o : v.operands)
      if (!values[o].expensive && !values[o].fixed) operands += chain[o];
    if (!v.expensive) chain[i] = v.seconds + operands;
    if (v.fixed || v.site < 0) continue;
    Site& site = model.sites[v.site];
    site.open = true;
    site.seconds += v.expensive ? v.seconds + operands : v.seconds * static_cast<double>(times[i]);
    site.flops += v.expensive ? v.flops : static_cast<double>(v.bytes / 4 * static_cast<int64_t>(times[i]));
  }
}

std::vector<bool> base_choice(const StepModel& model) {
  std::vector<bool> base;
  for (const Site& s : model.sites) base.push_back(!s.expensive);
  return base;
}

double predicted_seconds(const StepModel& model, const std::vector<bool>& recomputed) {
  double t = model.seconds;
  for (size_t s = 0; s < model.sites.size(); ++s)
    if (const Site& site = model.sites[s]; site.open)
      t += site.seconds * (static_cast<int>(recomputed[s]) - static_cast<int>(!site.expensive));
  // Where steps are short, timings are rough.
  return std::max(t, model.seconds / 2);
}

std::vector<std::vector<char>> needs(const StepModel& model, const std::vector<bool>& recomputed, size_t window) {
  const size_t first = model.first_backward, backward = model.slots.size() - first;
  std::vector<std::vector<char>> need(model.values.size(), std::vector<char>(backward));
  for (size_t i = model.values.size(); i-- > 0;) {
    const Value& v = model.values[i];
    auto& own = need[i];
    for (size_t t = 0; first + t + window < static_cast<size_t>(v.end); ++t) own[t] = 0;
    for (const int t : v.read_in) own[t - first] = 1;
    // What was recomputed once stays until it is not needed any more.
    if (v.expensive)
      for (size_t t = 1; t < backward && first + t < static_cast<size_t>(v.end); ++t) own[t] |= own[t - 1];
    const bool from_operands = !v.fixed && (v.site < 0 || recomputed.empty() || recomputed[v.site]);
    if (!from_operands) continue;
    for (const int o : v.operands)
      for (size_t t = 0; t < backward; ++t) need[o][t] |= own[t];
  }
  return need;
}

std::vector<double> predicted_bytes(const StepModel& model, const std::vector<bool>& recomputed) {
  const size_t slots = model.slots.size(), first = model.first_backward;
  const auto need = needs(model, recomputed, slots);
  std::vector<double> live;
  for (const auto& slot : model.slots) live.push_back(static_cast<double>(slot.peak + slot.correction));
  for (size_t i = 0; i < model.values.size(); ++i) {
    const Value& v = model.values[i];
    if (v.fixed || v.site < 0) continue;
    const auto bytes = static_cast<double>(v.bytes);
    if (v.expensive && recomputed[v.site]) {
      for (size_t t = 0; t < first; ++t)
        if (model.slots[t].at > v.last_forward) live[t] -= bytes;
      for (size_t t = first; t < slots && t < static_cast<size_t>(v.end); ++t)
        if (!need[i][t - first]) live[t] -= bytes;
    } else if (!v.expensive && !recomputed[v.site]) {
      for (size_t t = 0; t < slots && t < static_cast<size_t>(v.end); ++t)
        if (t >= first || model.slots[t].at > v.last_forward) live[t] += bytes;
    }
  }
  return live;
}

double predicted_peak(const StepModel& model, const std::vector<bool>& recomputed) {
  const auto live = predicted_bytes(model, recomputed);
  return *std::max_element(live.begin(), live.end());
}

}  // namespace tsmem
