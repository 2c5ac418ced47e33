#include "rewriter/plan/measurement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "ops/recompute_argument.h"

namespace tsmem {
namespace {

// What estimates take a device for, beside kFlopsPerSecond: ten operations in the time of one byte.
constexpr double kBytesPerSecond = 1e10;
// Of the seconds measured alone: recomputing something is never free, however a loaded machine times it.
constexpr double kLeastFactor = 0.05;
// Standard deviations: of one step's seconds, and of what sums of operators' seconds say of a step.
constexpr double kStepSpread = 0.05, kSumSpread = 0.35;
// How often forward and backward of a cheap operator pass over its output's bytes: PyTorch's norm and activation, and
// ours, which are one operator.
constexpr double kOriginalPasses = 9, kPasses = 7;

// How long steps are timed after the first round. There is one more at least, and up to kMostUnsettled rounds while the
// two shortest steps are further than kSettled from one another.
constexpr double kTimingSeconds = 2, kSettled = 1.05;
constexpr int kMostUnsettled = 4;

double seconds_of(const TrainingStep& s) { return s.forward_seconds + s.backward_seconds; }

Choice base_choice(const std::vector<Site>& sites) {
  Choice base;
  for (const Site& s : sites) base.push_back(s.expensive ? Fate::keep : Fate::recompute);
  return base;
}

// What three steps of the rewritten module have noted. They see the same values, other than where forward depends on
// numbers.
struct Notes {
  Journal timed, base, all;  // the base choice, with every value's seconds; the same without; everything recomputed
  std::vector<bool> held_in_base, held_in_all;  // of each value: somebody held it at the end of forward
};

std::vector<bool> held(const Journal& journal) {
  std::vector<bool> held;
  for (const auto& v : journal.values) held.push_back(!v.storage.expired());
  return held;
}

// Seconds of steps that ran in turns. The shortest counts: what else the machine does only adds.
struct Timings {
  struct Rounds {  // of the base choice and of another one
    double base = std::numeric_limits<double>::infinity(), other = base;
    int count = 0;
  };
  Rounds all, none;  // beside everything recomputed, and nothing; differences are of the same rounds
  std::multiset<double> base, original;

  void add(Rounds& r, double base_seconds, double other_seconds, double original_seconds) {
    original.insert(original_seconds);
    base.insert(base_seconds);
    r = {std::min(r.base, base_seconds), std::min(r.other, other_seconds), r.count + 1};
  }
};

bool settled(const std::multiset<double>& s) { return *std::next(s.begin()) < kSettled * *s.begin(); }

// More rounds of the base choice, another one and the original.
void time_steps(TrialStep& rewritten, TrainingStep& original, Timings& timings,
                const std::function<void(const std::string&)>& say) {
  double spent = 0;
  const auto run = [&](TrainingStep& s) {
    s.run();
    spent += seconds_of(s);
    return seconds_of(s);
  };
  const auto more = [&](int i) {
    return i < 2 || (i < 30 && spent * i / (i - 1) < kTimingSeconds) ||
           (i < kMostUnsettled && !(settled(timings.original) && settled(timings.base)));
  };
  for (int i = 1; more(i); ++i) {
    say(fmt::format("planning: timing step {}", i));
    rewritten.choose(base_choice(rewritten.sites));
    const double base = run(rewritten.step);
    const bool all = i % 2 == 0;
    rewritten.choose(Choice(rewritten.sites.size(), all ? Fate::recompute : Fate::keep));
    const double other = run(rewritten.step);
    original.run();
    timings.add(all ? timings.all : timings.none, base, other, seconds_of(original));
  }
}

// Seconds of a step from its values' FLOPs and bytes. Not 0 where nothing in the model is known.
double estimated_seconds(const Journal& journal, double passes) {
  double flops = 0, bytes = 0;
  for (const auto& v : journal.values)
    (v.flops > 0 ? flops : bytes) += v.flops > 0 ? v.flops : static_cast<double>(v.bytes);
  return std::max(3 * flops / kFlopsPerSecond + passes * bytes / kBytesPerSecond, 1e-9);
}

// Of each value: who reads it in backward, and until when forward does.
void add_uses(StepModel& model, const Journal& journal) {
  std::multimap<int, int> slots_at;
  for (size_t t = model.first_backward + 1; t < model.slots.size(); ++t)
    slots_at.emplace(model.slots[t].at, static_cast<int>(t));
  for (const Journal::Use& u : journal.uses) {
    auto& v = model.values[u.value];
    v.last_forward = std::max(v.last_forward, std::min<int>(u.at, static_cast<int>(model.values.size()) - 1));
    for (auto [it, last] = slots_at.equal_range(u.at); it != last; ++it) v.read_in.push_back(it->second);
  }
  for (auto& v : model.values) {
    std::sort(v.read_in.begin(), v.read_in.end());
    v.read_in.erase(std::unique(v.read_in.begin(), v.read_in.end()), v.read_in.end());
  }
}

void add_values(StepModel& model, const Notes& notes, bool estimate) {
  const auto& noted = notes.base.values;
  const bool same = notes.timed.values.size() == noted.size() && notes.all.values.size() == noted.size();
  for (size_t i = 0; i < noted.size(); ++i) {
    const Journal::Value& j = noted[i];
    StepModel::Value v;
    v.site = static_cast<int>(j.site);
    v.bytes = j.bytes;
    v.expensive = j.flops > 0;
    v.flops = j.flops;
    v.operands = j.operands;
    v.seconds = estimate ? j.flops / kFlopsPerSecond + 2.0 * static_cast<double>(j.bytes) / kBytesPerSecond
                : same   ? notes.timed.values[i].seconds
                         : 0;
    v.fixed = !same || (notes.held_in_all[i] && (v.expensive || notes.held_in_base[i]));
    // Kept in place of expensive operands of as many bytes: it stands and falls with those.
    if (!v.expensive && notes.held_in_base[i] && !notes.held_in_all[i]) v.site = -1;
    add_value(model, std::move(v));
  }
  add_uses(model, notes.base);
  // What was not kept although nothing was recomputed from it: there is nothing to choose.
  for (size_t i = model.values.size(); i-- > 0;) {
    auto& v = model.values[i];
    bool needed = notes.held_in_base[i] || !v.read_in.empty();
    for (const int w : v.users) needed |= !model.values[w].fixed;
    if (!needed) v.fixed = true;
  }
}

// What sites take together was measured too, of the expensive ones and of the others. The sum and this difference of
// steps are weighed by how far either is off.
void weigh_with_steps(StepModel& model, const Timings& timings) {
  for (const bool expensive : {true, false}) {
    double sum = 0;
    for (const auto& s : model.sites) sum += s.expensive == expensive ? s.seconds : 0;
    const Timings::Rounds& r = expensive ? timings.all : timings.none;
    const double difference = expensive ? r.other - r.base : r.base - r.other;
    const double spread = kStepSpread * model.seconds * std::sqrt(2.0 / r.count);
    const double weight = 1 / (1 + std::pow(spread / (kSumSpread * sum), 2));
    const double factor = 1 + weight * (difference / sum - 1);
    for (auto& s : model.sites)
      if (s.expensive == expensive && sum > 0) s.seconds *= std::max(factor, kLeastFactor);
  }
}

StepModel model_of(const std::vector<Site>& sites, const Notes& notes, const StepMemory& base, double seconds,
                   const MeasurementOptions& options) {
  StepModel model;
  model.seconds = seconds;
  model.link = options.link;
  model.slots = base.slots;
  while (model.first_backward < model.slots.size() && !model.slots[model.first_backward].backward)
    ++model.first_backward;
  model.sites.resize(sites.size());
  for (size_t s = 0; s < sites.size(); ++s) model.sites[s].expensive = sites[s].expensive;
  add_values(model, notes, options.estimate);
  complete(model);
  return model;
}

}  // namespace

TrialStep::TrialStep(torch::jit::Module& module, std::vector<Site> all_sites, const std::vector<c10::IValue>& inputs,
                     const StepOptions& run)
    : sites(std::move(all_sites)), step(module, inputs, run) {
  for (const Site& s : sites) owners.push_back(submodule(module, s.module));
}

void TrialStep::choose(const Choice& choice) {
  for (size_t s = 0; s < sites.size(); ++s)
    owners[s].setattr(sites[s].attribute,
                      RecomputeArgument(recompute_of(choice[s]), static_cast<int64_t>(s)).argument());
}

Recompute recompute_of(Fate fate) {
  return fate == Fate::recompute ? Recompute::each_time : fate == Fate::offload ? Recompute::offload : Recompute::keep;
}

Measurement measure(TrialStep& rewritten, TrainingStep& original, const MeasurementOptions& options) {
  const auto say = [&](const std::string& text) {
    if (options.progress) options.progress(text);
  };
  const Choice base = base_choice(rewritten.sites), all(rewritten.sites.size(), Fate::recompute);
  Measurement m;
  rewritten.choose(base);
  say("planning: warm-up steps");
  original.run();
  rewritten.step.run();
  original.run();
  say("planning: seconds of every operator");
  Notes notes;
  notes.timed.timed = !options.estimate;
  metered(rewritten.step, options.device, notes.timed);
  say("planning: memory of a step");
  m.base = metered(rewritten.step, options.device, notes.base, [&] { notes.held_in_base = held(notes.base); });
  const double base_seconds = seconds_of(rewritten.step);
  rewritten.choose(all);
  metered(rewritten.step, options.device, notes.all, [&] { notes.held_in_all = held(notes.all); });
  Journal none;  // the original's operators are told of nothing
  none.closed = true;
  m.original = metered(original, options.device, none);
  if (options.estimate) {
    m.original_seconds = estimated_seconds(notes.base, kOriginalPasses);
    m.model = model_of(rewritten.sites, notes, m.base, estimated_seconds(notes.base, kPasses), options);
    return m;
  }
  Timings timings;
  timings.add(timings.all, base_seconds, seconds_of(rewritten.step), seconds_of(original));
  time_steps(rewritten, original, timings, say);
  m.original_seconds = *timings.original.begin();
  m.model = model_of(rewritten.sites, notes, m.base, *timings.base.begin(), options);
  weigh_with_steps(m.model, timings);
  return m;
}

}  // namespace tsmem
