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

// What the link needs for a copy beside its bytes, and what is too small to be worth one.
constexpr double kLatency = 1e-5;
constexpr int64_t kLeastOffloaded = 64 << 10;
// Offloaded values that are under way at once (ops/offload.h).
constexpr size_t kUnderWay = 2;

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
    // An expensive one stays until its own backward, and so does what was offloaded.
    v.dropped = own_backward[i] >= 0 ? own_backward[i] : v.end;
    if (v.expensive) v.end = v.dropped;
  }
  return times;
}

// When offloaded values are there. A value has left when kUnderWay more are on their way; it is fetched when that many
// are still to be used before it. The values that may be offloaded stand for those that are.
static void set_ways(StepModel& model) {
  const int first = static_cast<int>(model.first_backward);
  const auto need = needs(model, {}, model.slots.size());
  // Where it is used first; a cheap one also where something may be recomputed from it.
  const auto first_use = [&](size_t i) {
    const Value& v = model.values[i];
    int slot = v.read_in.empty() ? v.dropped : v.read_in.front();
    if (!v.expensive)
      if (const auto it = std::find(need[i].begin(), need[i].end(), 1); it != need[i].end())
        slot = std::min(slot, first + static_cast<int>(it - need[i].begin()));
    return slot;
  };
  std::vector<size_t> later;  // of expensive ones, the last first
  for (size_t i = model.values.size(); i-- > 0;) {
    Value& v = model.values[i];
    const bool stays = later.size() < kUnderWay;  // until forward has ended
    const size_t other = stays ? 0 : later[later.size() - kUnderWay];
    v.left = stays ? static_cast<int>(model.values.size()) : std::max(static_cast<int>(other), v.last_forward);
    v.fetched = stays ? first : std::min(first_use(i), first_use(other));
    if (v.expensive && !v.fixed && v.site >= 0 && model.sites[v.site].link_seconds > 0) later.push_back(i);
  }
}

bool is_there(const StepModel& model, const Value& v, size_t slot) {
  if (slot < model.first_backward) return model.slots[slot].at > v.last_forward && model.slots[slot].at <= v.left;
  return static_cast<int>(slot) >= v.fetched && static_cast<int>(slot) < v.dropped;
}

void complete(StepModel& model) {
  const std::vector<size_t> times = set_ends(model);
  const auto& values = model.values;
  std::vector<bool> small(model.sites.size());  // has a value that is too small to be offloaded
  std::vector<double> chain(values.size());     // seconds to compute a cheap value from expensive ones
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& v = values[i];
    double operands = 0;
    for (const int o : v.operands)
      if (!values[o].expensive && !values[o].fixed) operands += chain[o];
    if (!v.expensive) chain[i] = v.seconds + operands;
    if (v.fixed || v.site < 0) continue;
    Site& site = model.sites[v.site];
    site.open = true;
    site.bytes += v.bytes;
    if (model.link > 0) site.link_seconds += kLatency + static_cast<double>(v.bytes) / model.link;
    if (v.bytes < kLeastOffloaded) small[v.site] = true;
    site.seconds += v.expensive ? v.seconds + operands : v.seconds * static_cast<double>(times[i]);
    site.flops += v.expensive ? v.flops : static_cast<double>(v.bytes / 4 * static_cast<int64_t>(times[i]));
  }
  for (size_t i = 0; i < small.size(); ++i)
    if (small[i]) model.sites[i].link_seconds = 0;
  if (model.link > 0) set_ways(model);
}

Choice base_choice(const StepModel& model) {
  Choice base;
  for (const Site& s : model.sites) base.push_back(s.expensive ? Fate::keep : Fate::recompute);
  return base;
}

double predicted_seconds(const StepModel& model, const Choice& choice) {
  double t = model.seconds, link = 0;
  for (size_t s = 0; s < model.sites.size(); ++s)
    if (const Site& site = model.sites[s]; site.open) {
      t += site.seconds * (static_cast<int>(choice[s] == Fate::recompute) - static_cast<int>(!site.expensive));
      if (choice[s] == Fate::offload) link += site.link_seconds;
    }
  // Where steps are short, timings are rough.
  t = std::max(t, model.seconds / 2);
  const double forward = model.forward * model.seconds;
  return t + std::max(0.0, link - forward) + std::max(0.0, link - (model.seconds - forward));
}

std::vector<std::vector<char>> needs(const StepModel& model, const Choice& choice, size_t window) {
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
    const bool from_operands = !v.fixed && (v.site < 0 || choice.empty() || choice[v.site] == Fate::recompute);
    if (!from_operands) continue;
    for (const int o : v.operands)
      for (size_t t = 0; t < backward; ++t) need[o][t] |= own[t];
  }
  return need;
}

std::vector<double> predicted_bytes(const StepModel& model, const Choice& choice) {
  const size_t slots = model.slots.size(), first = model.first_backward;
  const auto need = needs(model, choice, slots);
  std::vector<double> live;
  for (const auto& slot : model.slots) live.push_back(static_cast<double>(slot.peak + slot.correction));
  for (size_t i = 0; i < model.values.size(); ++i) {
    const Value& v = model.values[i];
    if (v.fixed || v.site < 0) continue;
    const Fate fate = choice[v.site], base = v.expensive ? Fate::keep : Fate::recompute;
    if (fate == base) continue;
    const auto bytes = static_cast<double>(v.bytes);
    // Bytes in each slot beside those of a step that computes it and drops it.
    const auto stays = [&](Fate f, size_t t) {
      const bool ended = static_cast<int>(t) >= v.end, offloaded = f == Fate::offload && is_there(model, v, t);
      if (t < first)
        return offloaded || (f == Fate::keep && model.slots[t].at > v.last_forward && (v.expensive || !ended));
      if (!v.expensive) return offloaded || (f == Fate::keep && !ended);
      return !ended && (f == Fate::keep || need[i][t - first] != 0 || offloaded);
    };
    for (size_t t = 0; t < slots; ++t) live[t] += bytes * (stays(fate, t) - stays(base, t));
  }
  return live;
}

double predicted_peak(const StepModel& model, const Choice& choice) {
  const auto live = predicted_bytes(model, choice);
  return *std::max_element(live.begin(), live.end());
}

}  // namespace tsmem
