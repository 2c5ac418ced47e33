#include <algorithm>

#include "rewriter/clock.h"
#include "rewriter/plan/choice.h"

namespace tsmem {
namespace {

// The best of the choices that were offered: the fastest of those that fit, else the one with the smallest peak.
struct Best {
  const StepModel& model;
  double budget;
  Choice choice = base_choice(model);
  double peak = predicted_peak(model, choice);

  // Returns the peak of what was offered.
  double offer(const Choice& other) {
    const double p = predicted_peak(model, other);
    const bool better =
        p > budget ? p < peak : peak > budget || predicted_seconds(model, other) < predicted_seconds(model, choice);
    if (better) {
      choice = other;
      peak = p;
    }
    return p;
  }
};

// The open sites, those first that cost the fewest seconds a byte.
std::vector<size_t> cheapest_first(const StepModel& model) {
  std::vector<double> bytes(model.sites.size());
  for (const auto& v : model.values)
    if (v.site >= 0 && !v.fixed) bytes[v.site] += static_cast<double>(v.bytes);
  std::vector<size_t> order;
  for (size_t s = 0; s < model.sites.size(); ++s)
    if (model.sites[s].open) order.push_back(s);
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return model.sites[a].seconds * bytes[b] < model.sites[b].seconds * bytes[a]; });
  return order;
}

// The expensive outputs that the link moves beside forward, those first that take the longest a byte to recompute; the
// rest is kept.
Choice offload_what_the_link_moves(const StepModel& model, const std::vector<size_t>& order) {
  Choice choice(model.sites.size(), Fate::keep);
  double left = model.forward * model.seconds;
  for (auto s = order.rbegin(); s != order.rend(); ++s) {
    const auto& site = model.sites[*s];
    if (!site.expensive || site.link_seconds == 0 || site.link_seconds > left) continue;
    choice[*s] = Fate::offload;
    left -= site.link_seconds;
  }
  return choice;
}

// As many of the first sites as the budget asks for, of those that `rest` keeps.
void offer_first(Best& best, const std::vector<size_t>& order, const Choice& rest) {
  const auto first = [&](size_t count) {
    Choice choice = rest;
    for (size_t i = 0; i < count; ++i)
      if (Fate& fate = choice[order[i]]; fate == Fate::keep) fate = Fate::recompute;
    return choice;
  };
  best.offer(first(order.size()));
  for (size_t over = 0, fits = order.size(); over < fits;) {
    const size_t middle = over + (fits - over) / 2;
    if (best.offer(first(middle)) <= best.budget)
      fits = middle;
    else
      over = middle + 1;
  }
}

// Of the expensive ones all but one in so many bytes (Chen et al., Training Deep Nets with Sublinear Memory Cost,
// 2016).
void offer_segments(Best& best) {
  double expensive_bytes = 0;
  for (const auto& v : best.model.values) expensive_bytes += v.expensive ? static_cast<double>(v.bytes) : 0;
  for (double segment = expensive_bytes; segment > expensive_bytes / 1000; segment *= 0.8) {
    Choice choice = base_choice(best.model);
    double since = 0;
    for (const auto& v : best.model.values) {
      if (v.site < 0 || v.fixed || !v.expensive) continue;
      since += static_cast<double>(v.bytes);
      choice[v.site] = since < segment ? Fate::recompute : Fate::keep;
      if (since >= segment) since = 0;
    }
    best.offer(choice);
  }
}

// Keeps what fits as well, the slowest a byte first.
void keep_what_fits(Best& best, const std::vector<size_t>& order) {
  const auto start = Clock::now();
  for (auto s = order.rbegin(); s != order.rend() && best.peak <= best.budget && seconds_since(start) < 2; ++s) {
    if (best.choice[*s] != Fate::recompute) continue;
    Choice kept = best.choice;
    kept[*s] = Fate::keep;
    best.offer(kept);
  }
}

}  // namespace

Choice greedy_choice(const StepModel& model, double budget) {
  Best best{model, budget};
  const std::vector<size_t> order = cheapest_first(model);
  offer_first(best, order, Choice(model.sites.size(), Fate::keep));
  if (model.link > 0) offer_first(best, order, offload_what_the_link_moves(model, order));
  offer_segments(best);
  keep_what_fits(best, order);
  return best.choice;
}

}  // namespace tsmem
