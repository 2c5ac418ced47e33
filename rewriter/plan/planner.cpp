#include "rewriter/plan/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "ops/recompute_argument.h"
#include "rewriter/clock.h"
#include "rewriter/error.h"
#include "rewriter/measure/estimate.h"
#include "rewriter/plan/measurement.h"

namespace tsmem {

using torch::jit::Module;

// "12.3 MiB", and in KiB what is less than one.
static std::string size_text(int64_t bytes, bool round_up = false) {
  const bool small = bytes < (1 << 20);
  const double tenths = static_cast<double>(bytes) / (small ? 102.4 : 104857.6);
  return fmt::format("{:.1f} {}", (round_up ? std::ceil(tenths) : tenths) / 10, small ? "KiB" : "MiB");
}

void set_choice(const Module& module, const std::vector<Site>& sites, const Choice& choice) {
  for (size_t s = 0; s < sites.size(); ++s)
    submodule(module, sites[s].module).setattr(sites[s].attribute, argument_of(recompute_of(choice[s])));
}

static StepOptions step_options(const PlanOptions& options) {
  StepOptions run;
  run.method = options.method;
  run.device = options.device;
  run.seed = options.seed;
  return run;
}

// Says which operator an estimate fails for.
static Error not_estimated(const Error& e) {
  const std::string text = e.what();
  const auto end = text.find(": attempted to run this operator with Meta"), begin = text.rfind("aten::", end);
  return Error(ErrorKind::input,
               fmt::format("This model can't be estimated from shapes alone ({}).",
                           end == std::string::npos || begin == std::string::npos
                               ? text
                               : text.substr(begin, end - begin) + " has no shape function"),
               "estimate");
}

static StepModel without_link(StepModel model) {
  for (auto& site : model.sites) site.link_seconds = 0;
  return model;
}

struct Planner::Impl {
  // A choice that was measured.
  struct Measured {
    Choice choice;
    StepMemory memory;
    double seconds;  // predicted
  };

  std::shared_ptr<const void> on_meta;  // with estimates
  Module module;
  std::vector<c10::IValue> inputs;
  PlanOptions options;
  TrialStep trial;
  Measurement base;
  std::vector<Measured> measured;
  double solving = 0;
  size_t solves = 0;

  void say(const std::string& text) const {
    if (options.progress) options.progress(text);
  }
  StepModel& model() { return base.model; }
  StepMemory measure_choice(const Choice& choice);
  const Measured& try_choice(const Choice& choice);
  Choice try_smallest(bool offload, Choice smallest);
  template <class Solve>
  std::optional<PlanChoice> timed(Solve solve);
  const Measured* best(int64_t budget) const;
  PlanPoint point(const Measured& m, int64_t budget, double gap) const;
};

StepMemory Planner::Impl::measure_choice(const Choice& choice) {
  Journal journal;
  trial.choose(choice);
  return metered(trial.step, options.device, journal);
}

// Measures a choice once; what it needs beyond what is predicted is noted in the model, each time.
const Planner::Impl::Measured& Planner::Impl::try_choice(const Choice& choice) {
  auto m =
      std::find_if(measured.begin(), measured.end(), [&](const Measured& other) { return other.choice == choice; });
  if (m == measured.end()) {
    say(fmt::format("planning: measuring plan {}", measured.size()));
    m = measured.insert(m, {choice, measure_choice(choice), predicted_seconds(model(), choice)});
  }
  auto& slots = model().slots;
  if (m->memory.slots.size() == slots.size()) {
    const auto predicted = predicted_bytes(model(), choice);
    for (size_t i = 0; i < slots.size(); ++i)
      slots[i].correction += m->memory.slots[i].peak - static_cast<int64_t>(predicted[i]);
  }
  return *m;
}

template <class Solve>
std::optional<PlanChoice> Planner::Impl::timed(Solve solve) {
  const auto start = Clock::now();
  auto choice = solve();
  solving += seconds_since(start);
  ++solves;
  return choice;
}

// The fastest that was measured and fits.
const Planner::Impl::Measured* Planner::Impl::best(int64_t budget) const {
  const Measured* found = nullptr;
  for (const Measured& m : measured)
    if (m.memory.peak <= budget && (!found || m.seconds < found->seconds)) found = &m;
  return found;
}

PlanPoint Planner::Impl::point(const Measured& m, int64_t budget, double gap) const {
  PlanPoint p;
  p.budget = budget;
  p.predicted_peak_bytes = m.memory.peak;
  p.predicted_seconds = m.seconds;
  p.kept_bytes = m.memory.kept;
  for (size_t s = 0; s < m.choice.size(); ++s) {
    const auto& site = base.model.sites[s];
    if (site.open && m.choice[s] == Fate::recompute) p.recomputed_flops += site.flops;
    if (site.open && m.choice[s] == Fate::offload) p.offloaded_bytes += site.bytes;
  }
  p.choice = m.choice;
  p.gap = gap;
  return p;
}

Planner::Planner(Module& original, Module& module, std::vector<Site> sites, const std::vector<c10::IValue>& inputs,
                 const PlanOptions& options) {
  auto on_meta = options.estimate ? estimate_on_meta() : nullptr;
  const StepOptions run = step_options(options);
  TrainingStep original_step(original, inputs, run);
  impl_.reset(
      new Impl{std::move(on_meta), module, inputs, options, TrialStep(module, std::move(sites), inputs, run), {}, {}});
  try {
    impl_->base = measure(impl_->trial, original_step,
                          {options.device, options.offload ? options.link : 0, options.estimate, options.progress});
  } catch (const Error& e) {
    if (options.estimate) throw not_estimated(e);
    throw;
  }
  const StepModel& model = impl_->model();
  impl_->measured.push_back({base_choice(model), impl_->base.base, model.seconds});
}

Planner::~Planner() = default;

// The choice with the smallest peak, of a few that were measured one after the other.
Choice Planner::Impl::try_smallest(bool offload, Choice smallest) {
  std::set<Choice> tried;
  for (int i = 0; i < 3; ++i) {
    say("planning: the smallest budget");
    const auto found =
        timed([&] { return smallest_choice(offload ? model() : without_link(model()), smallest, options.solver); });
    if (!found || !tried.insert(found->choice).second) break;
    smallest = found->choice;
    try_choice(smallest);
  }
  return smallest;
}

PlanPoint Planner::smallest() {
  // From the beginning, so that it ends at the same place whatever was planned before.
  for (auto& slot : impl_->model().slots) slot.correction = 0;
  // Without the link first: with it there are far more choices, and the solver comes less far.
  Choice smallest = impl_->try_smallest(false, {});
  if (impl_->model().link > 0) impl_->try_smallest(true, std::move(smallest));
  const auto least = std::min_element(impl_->measured.begin(), impl_->measured.end(),
                                      [](auto& a, auto& b) { return a.memory.peak < b.memory.peak; });
  return impl_->point(*least, least->memory.peak, 0);
}

PlanPoint Planner::plan(int64_t budget) {
  double margin = 0, gap = 0;
  for (int i = 0; i < 8; ++i) {
    impl_->say("planning: solving");
    const double limit = static_cast<double>(budget) - margin;
    const Impl::Measured* known = impl_->best(static_cast<int64_t>(limit));
    const auto choice = impl_->timed(
        [&] { return fastest_choice(impl_->model(), limit, known ? known->choice : Choice(), impl_->options.solver); });
    if (!choice) break;
    gap = choice->gap;
    const size_t before = impl_->measured.size();
    const Impl::Measured& m = impl_->try_choice(choice->choice);
    const auto over = static_cast<double>(m.memory.peak - budget);
    if (over <= 0) break;
    // The same choice again: the corrections did not tell.
    if (impl_->measured.size() == before) {
      if (!choice->solved) break;
      margin += over;
    }
  }
  if (const Impl::Measured* m = impl_->best(budget)) return impl_->point(*m, budget, gap);
  const auto percent = [&](int64_t bytes) {
    return 100 * static_cast<double>(bytes) / static_cast<double>(impl_->base.original.peak);
  };
  const PlanPoint least = smallest();
  if (least.predicted_peak_bytes <= budget) return impl_->point(*impl_->best(budget), budget, gap);
  constexpr double kNothingSaved = 99;  // per cent
  throw Error(
      ErrorKind::budget,
      fmt::format("No plan was found whose peak is at most {} ({:.1f} % of the original's); the smallest possible "
                  "budget is {} ({:.1f} %, {} bytes).",
                  size_text(budget), percent(budget), size_text(least.predicted_peak_bytes, true),
                  std::ceil(percent(least.predicted_peak_bytes) * 10) / 10, least.predicted_peak_bytes),
      percent(least.predicted_peak_bytes) > kNothingSaved ? "budget" : "");
}

std::vector<PlanPoint> Planner::front(int64_t largest, int count) {
  std::vector<int64_t> budgets;
  const int64_t least = smallest().predicted_peak_bytes;
  for (int i = 0; i < count; ++i)
    budgets.push_back(least + (std::max(largest, least) - least) * i / std::max(count - 1, 1));
  // A plan that was found for one budget serves all larger ones, so all are made before any is chosen.
  std::vector<double> gaps;
  for (int64_t b : budgets) gaps.push_back(plan(b).gap);
  for (const Impl::Measured& m : impl_->measured) budgets[0] = std::min(budgets[0], m.memory.peak);
  std::vector<PlanPoint> points;
  for (size_t i = 0; i < budgets.size(); ++i)
    points.push_back(impl_->point(*impl_->best(budgets[i]), budgets[i], gaps[i]));
  return points;
}

int64_t Planner::batch() const { return batch_of(impl_->inputs); }

Batches Planner::batches(const Choice& choice, int64_t other) {
  const int64_t given = batch();
  if (other == given) other = 2 * other;
  impl_->say(fmt::format("planning: a batch of {}", other));
  const auto inputs = with_batch(impl_->inputs, other);
  const StepMemory needed = impl_->measure_choice(choice);
  TrainingStep step(impl_->module, inputs, step_options(impl_->options));
  step.run();
  Journal journal;
  return batches_through(given, needed, other, metered(step, impl_->options.device, journal));
}

Planner::Original Planner::original() const {
  return {impl_->base.original.peak, impl_->base.original.kept, impl_->base.original_seconds};
}

double Planner::solve_seconds() const { return impl_->solving; }
size_t Planner::solves() const { return impl_->solves; }

}  // namespace tsmem
