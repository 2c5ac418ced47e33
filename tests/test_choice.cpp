// Choices for a budget, compared with all choices there are. Step models alone: no module and no tensor.
#include "rewriter/plan/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace tsmem {
namespace {

constexpr int64_t kMiB = 1024 * 1024;

struct Layer {
  bool expensive;
  int64_t bytes;
  double seconds;
  std::vector<int> operands;   // layers
  bool reads_operands = true;  // its backward does
  bool reads_output = false;   // the same
  int site = -1;               // one that another layer has too; -1: its own, unless `chosen` is false
  bool chosen = true, fixed = false;
};

// The model of a step through layers, one slot for each in forward and in backward. Under the base choice a slot needs
// the outputs of expensive layers that are there, and `transient` bytes. `link`: bytes a second.
StepModel step_of(const std::vector<Layer>& layers, int64_t transient = 0, double link = 0) {
  StepModel model;
  model.link = link;
  const int n = static_cast<int>(layers.size());
  for (int i = 0; i < n; ++i) {
    const Layer& l = layers[i];
    StepModel::Value v;
    v.expensive = l.expensive;
    v.fixed = l.fixed;
    v.bytes = l.bytes;
    v.seconds = l.seconds;
    v.flops = l.expensive ? l.seconds * kFlopsPerSecond : 0;
    v.operands = l.operands;
    v.site = l.site;
    if (l.chosen && l.site < 0) {
      v.site = static_cast<int>(model.sites.size());
      model.sites.push_back({l.expensive});
    }
    add_value(model, std::move(v));
    model.seconds += 3 * l.seconds;
  }
  model.slots.push_back({0, false, transient});
  for (int i = 0; i < n; ++i) model.slots.push_back({i, false, transient});
  model.first_backward = model.slots.size();
  model.slots.push_back({n, true, transient});
  for (int i = n; i-- > 0;) {
    const int slot = static_cast<int>(model.slots.size());
    model.slots.push_back({i, true, transient});
    if (layers[i].reads_operands)
      for (const int o : layers[i].operands) model.values[o].read_in.push_back(slot);
    if (layers[i].reads_output) model.values[i].read_in.push_back(slot);
  }
  for (auto& v : model.values) {
    std::sort(v.read_in.begin(), v.read_in.end());
    v.read_in.erase(std::unique(v.read_in.begin(), v.read_in.end()), v.read_in.end());
  }
  complete(model);
  for (int i = 0; i < n; ++i)
    for (int t = i + 1; t < model.values[i].end; ++t)
      if (model.values[i].expensive) model.slots[t].peak += model.values[i].bytes;
  return model;
}

struct Cost {
  Choice choice;
  double seconds, peak;
};

Fate last_of(const StepModel::Site& site) { return site.link_seconds > 0 ? Fate::offload : Fate::recompute; }

// All choices there are.
std::vector<Cost> all_choices(const StepModel& model) {
  std::vector<Cost> all;
  const size_t n = model.sites.size();
  for (Choice choice(n, Fate::keep);;) {
    all.push_back({choice, predicted_seconds(model, choice), predicted_peak(model, choice)});
    // Counts, with a site a digit.
    size_t s = 0;
    for (; s < n && choice[s] == last_of(model.sites[s]); ++s) choice[s] = Fate::keep;
    if (s == n) break;
    choice[s] = choice[s] == Fate::keep ? Fate::recompute : Fate::offload;
  }
  return all;
}

const Cost* fastest_within(const std::vector<Cost>& all, double budget) {
  const Cost* best = nullptr;
  for (const Cost& c : all)
    if (c.peak <= budget && (!best || c.seconds < best->seconds)) best = &c;
  return best;
}

double smallest_peak(const std::vector<Cost>& all) {
  return std::min_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.peak < b.peak; })->peak;
}

// Time enough that the solver always comes to an end.
SolverLimits limits(double gap) { return {60, gap}; }

void expect_as_all_choices(const StepModel& model, const std::vector<Cost>& all, double budget, double gap) {
  const auto choice = fastest_choice(model, budget, {}, limits(gap));
  const Cost* best = fastest_within(all, budget);
  ASSERT_EQ(choice.has_value(), best != nullptr) << "budget " << budget;
  if (!best) return;
  EXPECT_TRUE(choice->solved);
  EXPECT_LE(predicted_peak(model, choice->choice), budget);
  double link_seconds = 0;
  for (const auto& s : model.sites) link_seconds += s.link_seconds;
  // What is offloaded counts a little, although the step is no longer for it.
  const double seconds = predicted_seconds(model, choice->choice);
  const double rounding = 1e-6 * model.seconds + 1e-3 * link_seconds;
  EXPECT_GE(seconds, best->seconds - rounding);
  EXPECT_LE(seconds, best->seconds + gap * model.seconds + rounding) << "budget " << budget;
  EXPECT_LE(seconds, best->seconds + choice->gap * model.seconds + rounding) << "what it says of itself";
}

void expect_smallest(const StepModel& model, const std::vector<Cost>& all) {
  const auto choice = smallest_choice(model, {}, limits(0));
  ASSERT_TRUE(choice && choice->solved);
  // What recomputing costs counts a little beside the bytes.
  double flops = 0;
  for (const auto& s : model.sites) flops += s.flops;
  const double tolerance = 1 + 1e-3 * flops / kFlopsPerSecond * static_cast<double>(kMiB);
  EXPECT_NEAR(predicted_peak(model, choice->choice), smallest_peak(all), tolerance);
}

// Budgets at, between and around the peaks there are.
std::vector<double> budgets_of(const std::vector<Cost>& all, std::mt19937& random) {
  std::vector<double> peaks;
  for (const Cost& c : all) peaks.push_back(c.peak);
  std::sort(peaks.begin(), peaks.end());
  std::vector<double> budgets{peaks.front() - 1024, peaks.front(), peaks.back()};
  for (int i = 0; i < 4; ++i) budgets.push_back(peaks[random() % peaks.size()] + (i % 2 ? 512 : 0));
  return budgets;
}

// Sizes are multiples of 1 KiB: far more than what the solver rounds.
StepModel random_step(std::mt19937& random, size_t sites, double link) {
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  std::vector<Layer> layers;
  std::vector<int> kind;  // of each site: expensive
  while (kind.size() < sites) {
    const int i = static_cast<int>(layers.size());
    Layer l{chance(40),
            1024 * (1 + static_cast<int64_t>(random() % 8192)),
            1e-3 * (1 + static_cast<double>(random() % 1000)),
            {}};
    if (!l.expensive) l.seconds /= 50;
    for (int o = 0; o < 2; ++o)
      if (i > 0 && chance(o ? 30 : 95)) l.operands.push_back(i - 1 - static_cast<int>(random() % std::min(i, 4)));
    l.reads_operands = chance(70);
    l.reads_output = !l.expensive && chance(40);
    l.fixed = chance(10);
    l.chosen = !chance(10);
    // A layer that is called twice.
    const auto twin = std::find(kind.begin(), kind.end(), l.expensive);
    if (l.chosen && chance(10) && twin != kind.end())
      l.site = static_cast<int>(twin - kind.begin());
    else if (l.chosen)
      kind.push_back(l.expensive);
    layers.push_back(l);
  }
  StepModel model = step_of(layers, 1024 * static_cast<int64_t>(random() % 4096), link);
  for (auto& slot : model.slots)
    if (chance(20)) slot.correction = 1024 * (static_cast<int64_t>(random() % 2048) - 512);
  return model;
}

void compare_random_steps(uint32_t seed, size_t sites, double gap, double link = 0) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(sites) + " sites");
  std::mt19937 random(seed);
  const StepModel model = random_step(random, sites, link);
  const auto all = all_choices(model);
  for (const double budget : budgets_of(all, random)) expect_as_all_choices(model, all, budget, gap);
  expect_smallest(model, all);
}

TEST(Choice, IsTheBestOfAllInRandomSteps) {
  for (uint32_t seed = 0; seed < 150; ++seed) compare_random_steps(seed, 1 + seed % 10, 0);
}

TEST(Choice, IsWithinTheGapThatIsAskedFor) {
  for (uint32_t seed = 1000; seed < 1040; ++seed) compare_random_steps(seed, 10, 0.05);
}

TEST(Choice, IsTheBestOfAllOf16Sites) {
  for (uint32_t seed = 2000; seed < 2004; ++seed) compare_random_steps(seed, 16, 0);
}

// Layers take from 1 ms to 1 s, and have up to 8 MiB.
TEST(Choice, OffloadsAsTheBestOfAllDoes) {
  for (uint32_t seed = 0; seed < 90; ++seed)
    compare_random_steps(seed, 1 + seed % 6, 0, std::vector{1e6, 1e7, 1e8}[seed % 3]);
}

// Three convolutions in a row, of which backward reads the inputs.
StepModel three_convolutions() {
  return step_of({{true, 4 * kMiB, 0.010, {}}, {true, 4 * kMiB, 0.002, {0}}, {true, 4 * kMiB, 0.030, {1}}});
}

TEST(Choice, KeepsAllWhereThereIsRoom) {
  const StepModel model = three_convolutions();
  const auto choice = fastest_choice(model, 1e9, {}, limits(0));
  ASSERT_TRUE(choice);
  EXPECT_EQ(choice->choice, Choice(3, Fate::keep));
  EXPECT_EQ(predicted_seconds(model, choice->choice), model.seconds);
}

TEST(Choice, RecomputesWhatCostsLeast) {
  // The last output is read by nobody, so to drop it would be free.
  const StepModel model = three_convolutions();
  EXPECT_EQ(predicted_peak(model, base_choice(model)), 12 * kMiB);
  const auto choice = fastest_choice(model, 8 * kMiB, {}, limits(0));
  ASSERT_TRUE(choice);
  EXPECT_LE(predicted_peak(model, choice->choice), 8 * kMiB);
  EXPECT_NEAR(predicted_seconds(model, choice->choice), fastest_within(all_choices(model), 8 * kMiB)->seconds, 1e-9);
}

TEST(Choice, SaysWhereNothingFits) {
  const StepModel model = three_convolutions();
  const double least = smallest_peak(all_choices(model));
  EXPECT_TRUE(fastest_choice(model, least, {}, limits(0)));
  EXPECT_FALSE(fastest_choice(model, least - 1024, {}, limits(0)));
}

TEST(Choice, KeepsWhatIsCheapWhereItFits) {
  // A convolution, a norm and a convolution: the norm's output is read by its user and recomputed at first.
  const StepModel model =
      step_of({{true, 4 * kMiB, 0.010, {}}, {false, 4 * kMiB, 0.001, {0}}, {true, 4 * kMiB, 0.010, {1}}});
  EXPECT_EQ(base_choice(model), (Choice{Fate::keep, Fate::recompute, Fate::keep}));
  const auto roomy = fastest_choice(model, 1e9, {}, limits(0));
  ASSERT_TRUE(roomy);
  EXPECT_EQ(roomy->choice, Choice(3, Fate::keep));
  EXPECT_NEAR(predicted_seconds(model, roomy->choice), model.seconds - 0.001, 1e-9);
}

TEST(Choice, LearnsFromCorrections) {
  StepModel model = three_convolutions();
  const double least = smallest_peak(all_choices(model));
  for (auto& slot : model.slots) slot.correction = kMiB;
  EXPECT_FALSE(fastest_choice(model, least, {}, limits(0)));
  EXPECT_TRUE(fastest_choice(model, least + kMiB, {}, limits(0)));
}

TEST(Choice, WhatIsRecomputedIsThereUntilItsOwnBackward) {
  // The first output is read early in backward, by the last layer: recomputed, it takes its bytes from there on.
  const StepModel model = step_of(
      {{true, 8 * kMiB, 0.010, {}}, {true, kMiB, 0.010, {0}}, {true, kMiB, 0.010, {1}}, {true, kMiB, 0.010, {2, 0}}});
  const auto kept = predicted_bytes(model, Choice(4, Fate::keep));
  const auto recomputed = predicted_bytes(model, {Fate::recompute, Fate::keep, Fate::keep, Fate::keep});
  const size_t last_layer = model.first_backward + 1;
  for (size_t t = last_layer; t < model.slots.size(); ++t) EXPECT_EQ(recomputed[t], kept[t]) << t;
  EXPECT_EQ(recomputed[model.first_backward], kept[model.first_backward] - 8 * kMiB);
}

// Eight convolutions of a second each.
StepModel eight_convolutions(double link) {
  std::vector<Layer> layers;
  for (int i = 0; i < 8; ++i) layers.push_back({true, 8 * kMiB, 1, i ? std::vector{i - 1} : std::vector<int>{}});
  return step_of(layers, 0, link);
}

TEST(Choice, OffloadsWhatTheLinkMovesAndRecomputesTheRest) {
  // All but the three that are under way or used at once leave; a fast link has time for all.
  const double least = predicted_peak(eight_convolutions(1e12), Choice(8, Fate::offload));
  EXPECT_EQ(least, 3 * 8 * kMiB);
  const auto fast = fastest_choice(eight_convolutions(1e12), least, {}, limits(0));
  ASSERT_TRUE(fast);
  EXPECT_EQ(std::count(fast->choice.begin(), fast->choice.end(), Fate::recompute), 0);
  EXPECT_NEAR(predicted_seconds(eight_convolutions(1e12), fast->choice), 24, 1e-6);
  // In the eight seconds of forward this one moves two outputs.
  const StepModel slow = eight_convolutions(2 * 8 * kMiB / 8.1);
  const auto some = fastest_choice(slow, 4 * 8 * kMiB, {}, limits(0));
  ASSERT_TRUE(some);
  EXPECT_LE(predicted_peak(slow, some->choice), 4 * 8 * kMiB);
  EXPECT_GT(std::count(some->choice.begin(), some->choice.end(), Fate::recompute), 0);
}

TEST(Choice, WaitsForWhatTheLinkTakesBeyondForwardAndBackward) {
  const StepModel model = eight_convolutions(8 * kMiB / 3.0);  // three seconds an output
  const Choice all(8, Fate::offload);
  EXPECT_NEAR(predicted_seconds(model, all), 24 + (24 - 8) + (24 - 16), 1e-3);
  EXPECT_NEAR(predicted_seconds(model, Choice(8, Fate::keep)), 24, 1e-9);
}

TEST(Choice, WhatIsSmallIsNotOffloaded) {
  const StepModel model = step_of({{true, 1024, 1, {}}, {true, 8 * kMiB, 1, {0}}}, 0, 1e12);
  EXPECT_EQ(model.sites[0].link_seconds, 0);
  EXPECT_GT(model.sites[1].link_seconds, 0);
}

TEST(Choice, TheGreedyOneFitsOrHasTheSmallestPeakTried) {
  const StepModel model = three_convolutions();
  for (const double budget : {8.0 * kMiB, 12.0 * kMiB})
    EXPECT_LE(predicted_peak(model, greedy_choice(model, budget)), budget);
  EXPECT_LT(predicted_peak(model, greedy_choice(model, 0)), predicted_peak(model, base_choice(model)));
  const StepModel linked = eight_convolutions(1e12);
  const Choice offloads = greedy_choice(linked, 3 * 8 * kMiB);
  EXPECT_LE(predicted_peak(linked, offloads), 3 * 8 * kMiB);
  EXPECT_GT(std::count(offloads.begin(), offloads.end(), Fate::offload), 0);
}

}  // namespace
}  // namespace tsmem
