#include "rewriter/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <utility>

#include "ops/recompute.h"
#include "rewriter/error.h"
#include "rewriter/estimate.h"
#include "rewriter/inputs.h"
#include "rewriter/memory.h"
#include "rewriter/milp.h"

namespace tsmem {
namespace {

using Clock = std::chrono::steady_clock;
using torch::jit::Module;

constexpr double kMiB = 1024.0 * 1024.0;

// What estimates take a device for: ten operations in the time of one byte.
constexpr double kFlopsPerSecond = 1e11, kBytesPerSecond = 1e10;
// Of the seconds measured alone: making something again is never free, however a loaded machine times it.
constexpr double kLeastFactor = 0.05;
// Standard deviations: of one step's seconds, and of what sums of operators' seconds say of a step.
constexpr double kStepSpread = 0.05, kSumSpread = 0.35;
// How often forward and backward of a cheap operator pass over its output's bytes: stock's norm and activation, and
// ours, which are one operator.
constexpr double kStockPasses = 9, kPasses = 7;

// How long steps are timed after the first round. There is one more at least, and up to kMostUnsettled rounds while the
// two shortest steps are further than kSettled from one another.
constexpr double kTimingSeconds = 2, kSettled = 1.05;
constexpr int kMostUnsettled = 4;

// How long one solve may take where nobody says: most choices are within 1 % of the best by then.
constexpr double kSolveSeconds = 2;

// Sizes that the solver can do in seconds.
constexpr size_t kMostColumns = 12000, kMostCells = 4'000'000;

// Live bytes in the slots between marks.
struct Slot {
  int at;  // values that there were in forward when the node was made whose backward begins the slot
  bool backward;
  int64_t peak;
};

struct Measured {
  std::vector<Slot> slots;
  int64_t peak = 0, kept = 0;
};

class Meter : public c10::MemoryReportingInfoBase {
 public:
  // device: without an index all of its kind count.
  explicit Meter(c10::Device device) : device_(device) {}
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* ptr, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != device_.type() || (device_.has_index() && device != device_) || bytes == 0) return;
    std::lock_guard lock(mutex_);
    if (paused || done) return;
    if (bytes > 0)
      live_[ptr] = bytes;
    else
      live_.erase(ptr);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  void mark(int at, bool backward) {
    std::lock_guard lock(mutex_);
    if (done) return;
    if (!slots.empty()) slots.back().peak = peak_;
    slots.push_back({at, backward, 0});
    highest = std::max(highest, peak_);
    peak_ = now_;
  }
  void finish() {
    mark(0, true);
    slots.pop_back();
    done = true;
  }
  // Of live blocks, without those at `exclude`.
  int64_t live(const std::set<const void*>& exclude) {
    std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& [ptr, bytes] : live_) sum += exclude.count(ptr) ? 0 : bytes;
    return sum;
  }

  std::vector<Slot> slots;
  int64_t highest = 0;
  bool paused = false, done = false;

 private:
  const c10::Device device_;
  std::mutex mutex_;
  int64_t now_ = 0, peak_ = 0;
  std::map<const void*, int64_t> live_;
};

class MeteredStep : public StepObserver {
 public:
  MeteredStep(c10::Device device, Journal& journal, std::function<void()> at_forward_end)
      : meter(std::make_shared<Meter>(device)), journal_(journal), at_forward_end_(std::move(at_forward_end)) {
    journal_.mark = [m = meter](int at, bool backward) { m->mark(at, backward); };
  }
  ~MeteredStep() override { stop(); }
  void started() override {
    reports_.emplace(meter);
    meter->mark(0, false);
    set_journal(&journal_);
  }
  void forward_done(const c10::IValue& output) override {
    std::set<const void*> exclude;
    for (const auto& t : all_tensors(output))
      if (t.has_storage()) exclude.insert(t.storage().data());
    kept = meter->live(exclude);
    journal_.closed = true;
    meter->mark(static_cast<int>(journal_.values.size()), true);
    if (at_forward_end_) at_forward_end_();
  }
  void pause(bool on) override { meter->paused = on; }
  void backward_done() override {
    meter->finish();
    stop();
  }

  std::shared_ptr<Meter> meter;
  int64_t kept = 0;

 private:
  void stop() {
    set_journal(nullptr);
    reports_.reset();
  }
  Journal& journal_;
  std::function<void()> at_forward_end_;
  std::optional<AllocatorReports> reports_;
};

// A value of forward, as the program sees it.
struct Value {
  int site = -1;       // -1: none; always made again
  bool fixed = false;  // somebody else holds it: nothing to choose
  int64_t bytes = 0;
  bool dear = false;
  double seconds = 0, flops = 0;
  std::vector<int> operands, users;  // other values
  std::vector<int> direct;           // slots whose backward reads it, ascending
  int end = 0;                       // it is gone from this slot on
  int last_forward = 0;              // the last value that is computed from it
};

}  // namespace

void set_choice(const Module& module, const std::vector<Site>& sites, const std::vector<bool>& again) {
  for (size_t s = 0; s < sites.size(); ++s)
    submodule(module, sites[s].module).setattr(sites[s].attribute, again[s] ? kEachTime : kKept);
}

struct Planner::Impl {
  Module module;
  std::vector<Site> sites;
  PlanOptions options;
  ProfileOptions run;
  std::vector<c10::IValue> inputs;
  std::vector<Module> owners;  // of each site
  std::unique_ptr<TrainingStep> step, original_step;
  Original original{};

  std::vector<Value> values;
  std::vector<bool> used;                        // sites that there is something to choose for
  std::vector<double> site_seconds, site_flops;  // that making it again adds
  Measured base;
  std::vector<bool> base_again;
  size_t first_backward = 0;  // slot
  double base_seconds = 0;
  struct Tried {
    std::vector<bool> again;
    Measured measured;
    double seconds;  // predicted
  };
  std::vector<Tried> tried;
  std::vector<int64_t> correction;  // of each slot: what the program missed
  double solving = 0;
  size_t solves = 0;

  void say(const std::string& text) const {
    if (options.progress) options.progress(text);
  }

  // In probes the magnitude tells the site, the sign whether it is made again.
  void write(const std::vector<bool>& again) {
    for (size_t s = 0; s < sites.size(); ++s)
      owners[s].setattr(sites[s].attribute, (again[s] ? 1 : -1) * (static_cast<int64_t>(s) + 2));
  }

  Measured measure(const std::vector<bool>& again, Journal& journal, const std::function<void()>& at_forward_end = {}) {
    write(again);
    return metered(*step, journal, at_forward_end);
  }

  Measured metered(TrainingStep& step, Journal& journal, const std::function<void()>& at_forward_end = {}) {
    MeteredStep metered(c10::Device(options.device), journal, at_forward_end);
    step.run(metered);
    Measured m;
    m.slots = metered.meter->slots;
    m.peak = metered.meter->highest;
    m.kept = metered.kept;
    return m;
  }

  void set_up();
  double predicted_seconds(const std::vector<bool>& again) const;
  std::vector<double> predicted_slots(const std::vector<bool>& again) const;
  const Tried& try_choice(const std::vector<bool>& again);
  std::vector<bool> greedy(double budget) const;
  struct Choice {
    std::vector<bool> again;
    double gap = 0;
    bool solved = false;  // by the solver
  };
  std::optional<Choice> choose(std::optional<double> budget, const std::vector<bool>& begin = {});
  PlanPoint point(const Tried& t, int64_t budget, double gap) const;
  const Tried* best(int64_t budget) const;
};

// Runs the steps that the program is made from.
void Planner::Impl::set_up() {
  const size_t n = sites.size();
  base_again.resize(n);
  std::vector<bool> all(n, true);
  for (size_t s = 0; s < n; ++s) base_again[s] = !sites[s].dear;
  write(base_again);
  say("planning: warm-up steps");
  original_step->run();
  step->run();
  original_step->run();
  say("planning: seconds of every operator");
  Journal timed;
  timed.timed = !options.estimate;
  measure(base_again, timed);
  const auto seconds_of = [](const TrainingStep& s) { return s.forward_seconds + s.backward_seconds; };
  // In turns, and the shortest of each: what else the machine does only adds. Differences are of the same rounds.
  constexpr double never = std::numeric_limits<double>::infinity();
  struct Rounds {
    double base = never, other = never;
    int count = 0;
  } all_again, none_again;
  std::multiset<double> stock_seconds, our_seconds;
  const auto settled = [](const std::multiset<double>& s) { return *std::next(s.begin()) < kSettled * *s.begin(); };
  const auto compared = [&](Rounds& r, double ours, double others) {
    stock_seconds.insert(seconds_of(*original_step));
    our_seconds.insert(ours);
    r = {std::min(r.base, ours), std::min(r.other, others), r.count + 1};
  };
  say("planning: memory of a step");
  Journal plain, journal, none;
  std::vector<bool> held_in_base, held;
  base = measure(base_again, plain, [&] {
    for (const auto& v : plain.values) held_in_base.push_back(!v.storage.expired());
  });
  const double base_once = seconds_of(*step);
  measure(all, journal, [&] {
    for (const auto& v : journal.values) held.push_back(!v.storage.expired());
  });
  none.closed = true;
  const Measured m = metered(*original_step, none);
  compared(all_again, base_once, seconds_of(*step));
  original = {m.peak, m.kept, 0};
  if (options.estimate) {
    double flops = 0, bytes = 0;
    for (const auto& v : plain.values)
      (v.flops > 0 ? flops : bytes) += v.flops > 0 ? v.flops : static_cast<double>(v.bytes);
    // Not 0 where nothing in the model is known.
    original.seconds = std::max(3 * flops / kFlopsPerSecond + kStockPasses * bytes / kBytesPerSecond, 1e-9);
    base_seconds = std::max(3 * flops / kFlopsPerSecond + kPasses * bytes / kBytesPerSecond, 1e-9);
  } else {
    double spent = 0;
    const auto more = [&](int i) {
      return i < 2 || (i < 30 && spent * i / (i - 1) < kTimingSeconds) ||
             (i < kMostUnsettled && !(settled(stock_seconds) && settled(our_seconds)));
    };
    for (int i = 1; more(i); ++i) {
      say(fmt::format("planning: timing step {}", i));
      const auto run = [&](TrainingStep& s) {
        s.run();
        spent += seconds_of(s);
        return seconds_of(s);
      };
      write(base_again);
      const double ours = run(*step);
      const bool again = i % 2 == 0;
      write(std::vector<bool>(n, again));
      const double others = run(*step);
      run(*original_step);
      compared(again ? all_again : none_again, ours, others);
    }
    original.seconds = *stock_seconds.begin();
    base_seconds = *our_seconds.begin();
  }
  original_step.reset();

  for (first_backward = 0; first_backward < base.slots.size() && !base.slots[first_backward].backward;)
    ++first_backward;
  const size_t slots = base.slots.size();
  std::multimap<int, int> slots_at;
  for (size_t t = first_backward + 1; t < slots; ++t) slots_at.emplace(base.slots[t].at, static_cast<int>(t));

  used.assign(n, false);
  site_seconds.assign(n, 0);
  site_flops.assign(n, 0);
  // The three runs see the same values, other than where forward depends on numbers.
  const bool same = timed.values.size() == plain.values.size() && journal.values.size() == plain.values.size();
  values.resize(plain.values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const Journal::Value& j = plain.values[i];
    Value& v = values[i];
    v.site = std::abs(j.recompute) >= 2 ? static_cast<int>(std::abs(j.recompute)) - 2 : -1;
    v.bytes = j.bytes;
    v.dear = j.flops > 0;
    v.flops = j.flops;
    v.operands = j.operands;
    v.seconds = options.estimate ? j.flops / kFlopsPerSecond + 2.0 * static_cast<double>(j.bytes) / kBytesPerSecond
                : same           ? timed.values[i].seconds
                                 : 0;
    v.fixed = !same || (held[i] && (v.dear || held_in_base[i]));
    // Kept in place of dear operands of as many bytes: it stands and falls with those.
    if (!v.dear && held_in_base[i] && !held[i]) v.site = -1;
    v.last_forward = static_cast<int>(i);
    for (int o : v.operands) {
      values[o].users.push_back(static_cast<int>(i));
      values[o].last_forward = static_cast<int>(i);
    }
  }
  for (const Journal::Use& u : plain.uses) {
    Value& v = values[u.value];
    v.last_forward = std::max(v.last_forward, std::min<int>(u.at, static_cast<int>(values.size()) - 1));
    for (auto [it, last] = slots_at.equal_range(u.at); it != last; ++it) v.direct.push_back(it->second);
  }
  // What was not kept although nothing was made again from it: there is nothing to choose.
  for (size_t i = values.size(); i-- > 0;) {
    Value& v = values[i];
    bool needed = held_in_base[i] || !v.direct.empty();
    for (int w : v.users) needed |= !values[w].fixed;
    if (!needed) v.fixed = true;
  }
  // Who needs what at the latest; users come after their operands.
  std::vector<int> last_need(values.size(), -1);
  std::vector<size_t> makes(values.size());
  for (size_t i = values.size(); i-- > 0;) {
    Value& v = values[i];
    std::sort(v.direct.begin(), v.direct.end());
    v.direct.erase(std::unique(v.direct.begin(), v.direct.end()), v.direct.end());
    makes[i] += v.direct.size();
    if (!v.direct.empty()) last_need[i] = std::max(last_need[i], v.direct.back());
    for (int o : v.operands) {
      if (!v.dear) makes[o] += makes[i];
      if (!v.dear && !v.fixed) last_need[o] = std::max(last_need[o], last_need[i]);
    }
    v.end = last_need[i] + 1;
    // A dear one stays until its own backward.
    if (auto own = slots_at.find(static_cast<int>(i)); v.dear && own != slots_at.end()) v.end = own->second;
  }
  std::vector<double> chain(values.size());  // seconds to make a cheap value from dear ones
  for (size_t i = 0; i < values.size(); ++i) {
    Value& v = values[i];
    double operands = 0;
    for (int o : v.operands)
      if (!values[o].dear && !values[o].fixed) operands += chain[o];
    if (!v.dear) chain[i] = v.seconds + operands;
    if (v.fixed || v.site < 0) continue;
    used[v.site] = true;
    site_seconds[v.site] += v.dear ? v.seconds + operands : v.seconds * static_cast<double>(makes[i]);
    site_flops[v.site] += v.dear ? v.flops : static_cast<double>(v.bytes / 4 * static_cast<int64_t>(makes[i]));
  }
  // What they take together was measured too, of the dear ones and of the others. The sum and this difference of steps
  // are weighed by how far either is off.
  if (!options.estimate)
    for (const bool dear : {true, false}) {
      double sum = 0;
      for (size_t s = 0; s < n; ++s) sum += sites[s].dear == dear ? site_seconds[s] : 0;
      const Rounds& r = dear ? all_again : none_again;
      const double difference = dear ? r.other - r.base : r.base - r.other;
      const double spread = kStepSpread * base_seconds * std::sqrt(2.0 / r.count);
      const double weight = 1 / (1 + std::pow(spread / (kSumSpread * sum), 2));
      const double factor = 1 + weight * (difference / sum - 1);
      for (size_t s = 0; s < n; ++s)
        if (sites[s].dear == dear && sum > 0) site_seconds[s] *= std::max(factor, kLeastFactor);
    }
  correction.assign(slots, 0);
  tried.push_back({base_again, base, base_seconds});
}

double Planner::Impl::predicted_seconds(const std::vector<bool>& again) const {
  double t = base_seconds;
  for (size_t s = 0; s < sites.size(); ++s)
    if (used[s]) t += site_seconds[s] * (static_cast<int>(again[s]) - static_cast<int>(base_again[s]));
  // Where steps are short, timings are rough.
  return std::max(t, base_seconds / 2);
}

namespace {

// need[v][t]: the backward of slot `first + t` reads v, or something that is made from it. `again`: the choice; empty:
// whatever is chosen. `window`: only what is made at most so many slots before its own op's backward.
std::vector<std::vector<char>> needs(const std::vector<Value>& values, size_t first, size_t slots,
                                     const std::vector<bool>& again, size_t window) {
  const size_t backward = slots - first;
  std::vector<std::vector<char>> need(values.size(), std::vector<char>(backward));
  for (size_t i = values.size(); i-- > 0;) {
    const Value& v = values[i];
    auto& own = need[i];
    for (size_t t = 0; first + t + window < static_cast<size_t>(v.end); ++t) own[t] = 0;
    for (int t : v.direct) own[t - first] = 1;
    // What was made once stays until it is not needed any more.
    if (v.dear)
      for (size_t t = 1; t < backward && first + t < static_cast<size_t>(v.end); ++t) own[t] |= own[t - 1];
    const bool made = !v.fixed && (v.site < 0 || again.empty() || again[v.site]);
    if (!made) continue;
    for (int o : v.operands)
      for (size_t t = 0; t < backward; ++t) need[o][t] |= own[t];
  }
  return need;
}

}  // namespace

std::vector<double> Planner::Impl::predicted_slots(const std::vector<bool>& again) const {
  const size_t slots = base.slots.size();
  const auto need = needs(values, first_backward, slots, again, slots);
  std::vector<double> live;
  for (size_t t = 0; t < slots; ++t) live.push_back(static_cast<double>(base.slots[t].peak + correction[t]));
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& v = values[i];
    if (v.fixed || v.site < 0) continue;
    const auto bytes = static_cast<double>(v.bytes);
    if (v.dear && again[v.site]) {
      for (size_t t = 0; t < first_backward; ++t)
        if (base.slots[t].at > v.last_forward) live[t] -= bytes;
      for (size_t t = first_backward; t < slots && t < static_cast<size_t>(v.end); ++t)
        if (!need[i][t - first_backward]) live[t] -= bytes;
    } else if (!v.dear && !again[v.site]) {
      for (size_t t = 0; t < slots && t < static_cast<size_t>(v.end); ++t)
        if (t >= first_backward || base.slots[t].at > v.last_forward) live[t] += bytes;
    }
  }
  return live;
}

// A choice that fits by the program's own reckoning, or the one with the smallest peak where none of these does: what
// costs the fewest seconds a byte is made again; or of the dear ones all but one in so many bytes (Chen et al.,
// Training Deep Nets with Sublinear Memory Cost, 2016). What fits as well is kept then, the slowest a byte first.
std::vector<bool> Planner::Impl::greedy(double budget) const {
  std::vector<double> bytes(sites.size());
  for (const Value& v : values)
    if (v.site >= 0 && !v.fixed) bytes[v.site] += static_cast<double>(v.bytes);
  std::vector<size_t> order;
  for (size_t s = 0; s < sites.size(); ++s)
    if (used[s]) order.push_back(s);
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return site_seconds[a] * bytes[b] < site_seconds[b] * bytes[a]; });
  const auto peak = [&](const std::vector<bool>& again) {
    const auto live = predicted_slots(again);
    return *std::max_element(live.begin(), live.end());
  };
  std::vector<bool> found = base_again;
  double least = peak(found);
  const auto offer = [&](const std::vector<bool>& again) {
    const double p = peak(again);
    const bool better = p > budget ? p < least : least > budget || predicted_seconds(again) < predicted_seconds(found);
    if (better) {
      found = again;
      least = p;
    }
    return p;
  };
  const auto first = [&](size_t count) {
    std::vector<bool> again = base_again;
    for (size_t i = 0; i < order.size(); ++i) again[order[i]] = i < count;
    return again;
  };
  offer(first(order.size()));
  for (size_t over = 0, fits = order.size(); over < fits;) {
    const size_t middle = over + (fits - over) / 2;
    if (offer(first(middle)) <= budget)
      fits = middle;
    else
      over = middle + 1;
  }
  double dear_bytes = 0;
  for (const Value& v : values) dear_bytes += v.dear ? static_cast<double>(v.bytes) : 0;
  for (double segment = dear_bytes; segment > dear_bytes / 1000; segment *= 0.8) {
    std::vector<bool> again = base_again;
    double since = 0;
    for (const Value& v : values) {
      if (v.site < 0 || v.fixed || !v.dear) continue;
      since += static_cast<double>(v.bytes);
      again[v.site] = since < segment;
      if (since >= segment) since = 0;
    }
    offer(again);
  }
  const auto start = Clock::now();
  for (auto s = order.rbegin(); s != order.rend() && least <= budget && Clock::now() - start < std::chrono::seconds(2);
       ++s) {
    if (!found[*s]) continue;
    std::vector<bool> again = found;
    again[*s] = false;
    offer(again);
  }
  return found;
}

// Solves the program: the fastest choice for a budget, or without one the choice with the smallest peak. Where the
// solver finds none in its time, or the program is too large for it, the greedy one. Nothing where there is none.
// The solver starts with `begin`, or the greedy one.
std::optional<Planner::Impl::Choice> Planner::Impl::choose(std::optional<double> budget,
                                                           const std::vector<bool>& begin) {
  const size_t slots = base.slots.size(), n = sites.size();
  Milp p;
  std::vector<int> x(n, -1);
  // The smallest peak does not depend on how long anything takes today.
  for (size_t s = 0; s < n; ++s)
    if (used[s]) x[s] = p.add(0, 1, budget ? site_seconds[s] : 1e-3 * site_flops[s] / kFlopsPerSecond, true);
  const int peak = budget ? -1 : p.add(0, 1e15, 1, false);
  std::vector<std::vector<std::pair<int, double>>> live(slots);  // terms of each slot's bytes, in MiB
  std::vector<double> constant(slots);
  for (size_t t = 0; t < slots; ++t) constant[t] = static_cast<double>(base.slots[t].peak + correction[t]) / kMiB;
  // Long chains of what is made from each other are left out where there would be too many columns.
  const size_t window = std::max<size_t>(4, kMostColumns / std::max<size_t>(1, values.size()));
  const auto need = needs(values, first_backward, slots, {}, window);
  // The column that says that a value must be there in a slot. -1: it must, whatever is chosen.
  std::vector<std::map<size_t, int>> there(values.size());
  for (size_t i = values.size(); i-- > 0;) {
    const Value& v = values[i];
    const double mib = static_cast<double>(v.bytes) / kMiB;
    const bool choice = !v.fixed && v.site >= 0;
    const size_t sure = v.direct.empty() ? slots : static_cast<size_t>(v.direct.front());
    for (size_t t = first_backward; t < slots; ++t) {
      if (!need[i][t - first_backward] || v.fixed) continue;
      if (v.dear ? t >= sure : std::binary_search(v.direct.begin(), v.direct.end(), static_cast<int>(t)))
        there[i][t] = -1;
      else
        there[i][t] = p.add(0, 1, 0, false);
    }
    for (auto it = there[i].begin(); it != there[i].end(); ++it) {
      if (it->second < 0) continue;
      // Once made, a dear one stays; and a kept one is there.
      if (v.dear && it != there[i].begin())
        if (int before = std::prev(it)->second; before >= 0) p.rows.push_back({{{before, 1}, {it->second, -1}}, 0});
      if (v.dear && choice) p.rows.push_back({{{x[v.site], -1}, {it->second, -1}}, -1});
      for (int w : v.users) {
        const Value& user = values[w];
        auto needed = there[w].find(it->first);
        if (user.fixed || needed == there[w].end()) continue;
        // there(user) + again(user) - 1 <= there(v)
        Milp::Row row{{{it->second, -1}}, 0};
        if (needed->second >= 0)
          row.entries.emplace_back(needed->second, 1);
        else
          row.limit -= 1;
        if (user.site >= 0) {
          row.entries.emplace_back(x[user.site], 1);
          row.limit += 1;
        }
        p.rows.push_back(std::move(row));
      }
    }
    // Where the window ends: not made there, so whoever is made from it is kept, or it is itself.
    if (!v.fixed)
      for (int w : v.users) {
        const Value& user = values[w];
        if (user.fixed) continue;
        for (const auto& [t, column] : there[w]) {
          if (there[i].count(t) || t >= static_cast<size_t>(v.end)) continue;
          Milp::Row row{{}, -1};
          const auto add = [&](int c) {
            if (c >= 0) row.entries.emplace_back(c, 1);
            if (c >= 0) row.limit += 1;
          };
          add(column);
          add(user.site >= 0 ? x[user.site] : -1);
          if (choice && (user.site < 0 || x[user.site] != x[v.site])) add(x[v.site]);
          if (!row.entries.empty()) p.rows.push_back(std::move(row));
        }
      }
    if (!choice) continue;
    for (size_t t = 0; t < slots && t < static_cast<size_t>(v.end); ++t) {
      const bool forward = t < first_backward;
      if (forward && base.slots[t].at <= v.last_forward) continue;
      if (!v.dear) {
        constant[t] += mib;
        live[t].emplace_back(x[v.site], -mib);
      } else if (auto it = there[i].find(t); forward || it == there[i].end()) {
        live[t].emplace_back(x[v.site], -mib);
      } else if (it->second >= 0) {
        constant[t] -= mib;
        live[t].emplace_back(it->second, mib);
      }
    }
  }
  const size_t most_rows = std::clamp<size_t>(kMostCells / std::max<size_t>(1, p.columns.size()), 100, 600);
  const size_t group = (slots + most_rows - 1) / most_rows;
  for (size_t t = 0; t < slots; ++t) {
    // Of a very long step the highest slot of each group.
    const size_t begin = t / group * group, end = std::min(begin + group, slots);
    if (std::max_element(&constant[begin], &constant[0] + end) != &constant[t]) continue;
    std::map<int, double> sum;
    for (const auto& [column, coefficient] : live[t]) sum[column] += coefficient;
    if (!budget) sum[peak] -= 1;
    p.rows.push_back({{sum.begin(), sum.end()}, (budget ? *budget / kMiB : 0) - constant[t]});
  }
  const auto start = Clock::now();
  std::vector<bool> again = begin.empty() ? greedy(budget.value_or(0)) : begin;
  if (const Tried* t = best(static_cast<int64_t>(budget.value_or(0))); t && t->seconds < predicted_seconds(again))
    again = t->again;
  std::vector<double> first(p.columns.size());
  for (size_t i = 0; i < n; ++i)
    if (x[i] >= 0) first[x[i]] = again[i];
  const double most = static_cast<double>(base.peak) / kMiB;
  MilpSolution s;
  const double size = std::max(1.0, static_cast<double>(p.columns.size()) / 6000);
  const double limit =
      options.solve_seconds > 0 ? options.solve_seconds : kSolveSeconds * size * (!budget && begin.empty() ? 2 : 1);
  if (p.columns.size() < 2 * kMostColumns) s = solve(p, limit, options.gap * (budget ? base_seconds : most), first);
  solving += std::chrono::duration<double>(Clock::now() - start).count();
  ++solves;
  if (s.infeasible) return std::nullopt;
  if (!s.found && !budget) again = greedy(0);
  // Without an answer nothing is known but that making something again takes time.
  if (!s.found)
    return Choice{again, (predicted_seconds(again) - predicted_seconds(std::vector<bool>(n))) / base_seconds, false};
  for (size_t i = 0; i < n; ++i)
    if (x[i] >= 0) again[i] = s.values[x[i]] > 0.5;
  return Choice{again, s.gap / base_seconds, true};
}

const Planner::Impl::Tried& Planner::Impl::try_choice(const std::vector<bool>& again) {
  auto t = std::find_if(tried.begin(), tried.end(), [&](const Tried& other) { return other.again == again; });
  if (t == tried.end()) {
    say(fmt::format("planning: measuring plan {}", tried.size()));
    Journal journal;
    Measured m = measure(again, journal);
    t = tried.insert(t, {again, std::move(m), predicted_seconds(again)});
  }
  if (t->measured.slots.size() == base.slots.size()) {
    const auto thought = predicted_slots(again);
    for (size_t i = 0; i < thought.size(); ++i)
      correction[i] += t->measured.slots[i].peak - static_cast<int64_t>(thought[i]);
  }
  return *t;
}

const Planner::Impl::Tried* Planner::Impl::best(int64_t budget) const {
  const Tried* found = nullptr;
  for (const Tried& t : tried)
    if (t.measured.peak <= budget && (!found || t.seconds < found->seconds)) found = &t;
  return found;
}

PlanPoint Planner::Impl::point(const Tried& t, int64_t budget, double gap) const {
  PlanPoint p;
  p.budget = budget;
  p.predicted_peak_bytes = t.measured.peak;
  p.predicted_seconds = t.seconds;
  p.kept_bytes = t.measured.kept;
  for (size_t s = 0; s < sites.size(); ++s)
    if (used[s] && t.again[s]) p.recomputed_flops += site_flops[s];
  p.again = t.again;
  p.gap = gap;
  return p;
}

Planner::Planner(Module& original, Module& module, std::vector<Site> sites, const std::vector<c10::IValue>& inputs,
                 const PlanOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->module = module;
  impl_->sites = std::move(sites);
  impl_->options = options;
  for (const Site& s : impl_->sites) impl_->owners.push_back(submodule(module, s.module));
  if (options.estimate) count_meta_allocations();
  impl_->inputs = inputs;
  ProfileOptions& run = impl_->run;
  run.method = options.method;
  run.device = options.device;
  run.seed = options.seed;
  impl_->original_step = std::make_unique<TrainingStep>(original, inputs, run);
  impl_->step = std::make_unique<TrainingStep>(module, inputs, run);
  try {
    impl_->set_up();
  } catch (const Error& e) {
    const std::string text = e.what();
    const auto end = text.find(": attempted to run this operator with Meta"), begin = text.rfind("aten::", end);
    if (!options.estimate) throw;
    throw Error(kBadInput, fmt::format("This model can't be estimated from shapes alone ({}); leave --estimate out.",
                                       end == std::string::npos || begin == std::string::npos
                                           ? text
                                           : text.substr(begin, end - begin) + " has no shape function"));
  }
}

Planner::~Planner() = default;

PlanPoint Planner::smallest() {
  // From the beginning, so that it ends at the same place whatever was planned before.
  impl_->correction.assign(impl_->correction.size(), 0);
  std::set<std::vector<bool>> chosen;
  std::vector<bool> again;
  for (int i = 0; i < 3; ++i) {
    impl_->say("planning: the smallest budget");
    const auto choice = impl_->choose(std::nullopt, again);
    if (!choice || !chosen.insert(choice->again).second) break;
    again = choice->again;
    impl_->try_choice(again);
  }
  const Impl::Tried* least = nullptr;
  for (const auto& t : impl_->tried)
    if (!least || t.measured.peak < least->measured.peak) least = &t;
  return impl_->point(*least, least->measured.peak, 0);
}

PlanPoint Planner::plan(int64_t budget) {
  double margin = 0, gap = 0;
  for (int i = 0; i < 8; ++i) {
    impl_->say("planning: solving");
    const auto choice = impl_->choose(static_cast<double>(budget) - margin);
    if (!choice) break;
    gap = choice->gap;
    const size_t before = impl_->tried.size();
    const auto& t = impl_->try_choice(choice->again);
    const auto over = static_cast<double>(t.measured.peak - budget);
    if (over <= 0) break;
    // The same choice again: the corrections did not tell.
    if (impl_->tried.size() == before) {
      if (!choice->solved) break;
      margin += over;
    }
  }
  if (const auto* t = impl_->best(budget)) return impl_->point(*t, budget, gap);
  const PlanPoint least = smallest();
  if (least.predicted_peak_bytes <= budget) return impl_->point(*impl_->best(budget), budget, gap);
  throw Error(kBudget,
              fmt::format("No plan was found whose peak is at most {:.1f} MiB; the smallest possible budget is "
                          "{:.1f} MiB ({} bytes).",
                          static_cast<double>(budget) / kMiB,
                          std::ceil(static_cast<double>(least.predicted_peak_bytes) / kMiB * 10) / 10,
                          least.predicted_peak_bytes));
}

std::vector<PlanPoint> Planner::front(int64_t largest, int count) {
  std::vector<int64_t> budgets;
  const int64_t least = smallest().predicted_peak_bytes;
  for (int i = 0; i < count; ++i)
    budgets.push_back(least + (std::max(largest, least) - least) * i / std::max(count - 1, 1));
  // A plan that was found for one budget serves all larger ones, so all are made before any is chosen.
  std::vector<double> gaps;
  for (int64_t b : budgets) gaps.push_back(plan(b).gap);
  for (const auto& t : impl_->tried) budgets[0] = std::min(budgets[0], t.measured.peak);
  std::vector<PlanPoint> points;
  for (size_t i = 0; i < budgets.size(); ++i)
    points.push_back(impl_->point(*impl_->best(budgets[i]), budgets[i], gaps[i]));
  return points;
}

int64_t Planner::Batches::peak(int64_t batch) const {
  double most = 0;
  for (size_t t = 0; t < fixed_.size(); ++t) most = std::max(most, fixed_[t] + each_[t] * static_cast<double>(batch));
  return static_cast<int64_t>(std::ceil(most));
}

int64_t Planner::Batches::largest(int64_t bytes) const {
  int64_t fits = 0, over = 1;
  while (over < (int64_t{1} << 40) && peak(over) <= bytes) over *= 2;
  while (over - fits > 1) {
    const int64_t middle = fits + (over - fits) / 2;
    (peak(middle) <= bytes ? fits : over) = middle;
  }
  return fits;
}

int64_t Planner::batch() const {
  const auto tensors = all_tensors(c10::ivalue::Tuple::create(impl_->inputs));
  if (tensors.empty() || tensors[0].dim() == 0 || tensors[0].size(0) == 0)
    throw Error(kBadInput, "The input's first tensor has no batch, so there is no batch size to change.");
  return tensors[0].size(0);
}

Planner::Batches Planner::batches(const std::vector<bool>& again, int64_t other) {
  Batches found;
  found.batch = batch();
  if (other == found.batch) other = 2 * other;
  impl_->say(fmt::format("planning: a batch of {}", other));
  std::vector<c10::IValue> inputs;
  for (const auto& v : impl_->inputs)
    inputs.push_back(map_tensors(v, [&](const at::Tensor& t) {
      if (t.dim() == 0 || t.size(0) != found.batch) return t;
      const std::vector<at::Tensor> copies(static_cast<size_t>((other + found.batch - 1) / found.batch), t);
      return at::cat(copies).narrow(0, 0, other).clone();
    }));
  Journal one, two;
  const Measured a = impl_->measure(again, one);
  TrainingStep step(impl_->module, inputs, impl_->run);
  step.run();
  const Measured b = impl_->metered(step, two);
  const bool same = a.slots.size() == b.slots.size();
  for (size_t t = 0; t < (same ? a.slots.size() : 1); ++t) {
    const auto x = static_cast<double>(same ? a.slots[t].peak : a.peak);
    const auto y = static_cast<double>(same ? b.slots[t].peak : b.peak);
    found.each_.push_back((y - x) / static_cast<double>(other - found.batch));
    found.fixed_.push_back(x - found.each_.back() * static_cast<double>(found.batch));
  }
  return found;
}

const Planner::Original& Planner::original() const { return impl_->original; }
double Planner::solve_seconds() const { return impl_->solving; }
size_t Planner::solves() const { return impl_->solves; }

}  // namespace tsmem
