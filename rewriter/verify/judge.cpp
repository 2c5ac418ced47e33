// Whether B's errors are more than rounding.
#include <ATen/Parallel.h>

#include <cmath>

#include "rewriter/measure/profile.h"
#include "rewriter/verify/verifier.h"

namespace tsmem {

constexpr double kF64Limit = 1e-9;   // A and B in float64
constexpr double kRatioLimit = 2.0;  // median of B's error over A's
constexpr double kOneRatio = 50;     // of one call alone: rounding may do that, so A's own spread decides
constexpr double kOneCall = 8;       // B's worst call over the worst of A's own runs

constexpr int kMovedInputs = 9;  // of which medians say whether one call's error is chance

// The errors that need no explanation. Of models in float64: a thousandth of what their copies in float64 may differ
// by, as the spread of few calls is too small a sample of so small errors.
static double rounding(double epsilon) { return epsilon < kF64Limit ? 1e-3 * kF64Limit : 4 * epsilon; }

void Verifier::judge_given(Mode mode, const std::function<Outcome(Module&, const std::vector<IValue>&)>& one, Module& a,
                           const std::vector<IValue>& inputs, const Outcome& ra, const Errors& e) {
  Errors own;
  const auto exceeded = [&] {
    const double floor = rounding(epsilon_);
    const std::tuple<const char*, double, double> all[] = {
        {"outputs", e.output, own.output}, {"gradients", e.gradient, own.gradient}, {"buffers", e.buffer, own.buffer}};
    for (const auto& [what, error, mine] : all)
      if (error > 8 * std::max(mine, floor))
        return fmt::format(
            "On the inputs given the second model's {} are off by {:.1e} {}, the first model's own by "
            "at most {:.1e} between layouts, thread counts and calls.",
            what, error, in_mode(mode), mine);
    return std::string();
  };
  const auto add = [&](const Outcome& o) {
    if (o.error.empty()) own.add(errors(o, ra));
  };
  add(one(a, vary(inputs, 1, epsilon_, options_.seed + 1)));
  if (exceeded().empty()) return;
  say(fmt::format("{}: own spread on the inputs given", name_of(mode)));
  add(one(a, vary(inputs, 1, epsilon_, options_.seed + 2)));
  const int threads = at::get_num_threads();
  at::set_num_threads(threads == 1 ? 2 : 1);
  add(one(a, inputs));
  at::set_num_threads(threads);
  std::vector<IValue> formatted;
  for (auto& v : inputs) formatted.push_back(map_tensors(v, channels_last));
  add(one(a, formatted));
  if (const auto text = exceeded(); !text.empty()) differs(text);
}

double Verifier::f64_limit() const { return std::max(kF64Limit, 4 * narrow_); }

double Verifier::ratio(double a, double b) const {
  const double floor = rounding(epsilon_);
  if (std::isinf(a) && std::isinf(b)) return 1;
  return std::max(b, floor) / std::max(a, floor);
}

void Verifier::judge(Mode mode, const Start& at, bool f64, double f64_worst, const Errors& worst,
                     std::pair<int, int> worst_call, std::vector<double> (&ratios)[3]) {
  if (f64) {
    f64_worst_ = std::max(f64_worst_, f64_worst);
    compared_in_f64_ = true;
    if (f64_worst > f64_limit()) {
      // The spread knows nothing of a fault in one of several calls.
      const auto enough = [&](const Spread& s) {
        return s.second.worst() <= 2 * s.own.worst() && f64_worst <= kOneCall * s.worst.worst();
      };
      const auto s = spread(mode, at, true, true, worst_call.second, enough);
      if (enough(s))
        note(
            fmt::format("In float64 {} the models differ by {:.1e}, within the first model's own spread between "
                        "layouts, thread counts and calls ({:.1e}).",
                        in_mode(mode), f64_worst, s.worst.worst()));
      else
        differs(fmt::format("In float64 {} the models differ by {:.1e}, more than {:.0e}.", in_mode(mode), f64_worst,
                            f64_limit()));
    }
    double medians[3], most = 0;
    for (int q = 0; q < 3; ++q) {
      medians[q] = median(ratios[q]);
      most = std::max(most, *std::max_element(ratios[q].begin(), ratios[q].end()));
    }
    r_.ratio_output = std::max(r_.ratio_output, medians[0]);
    r_.ratio_gradient = std::max(r_.ratio_gradient, medians[1]);
    r_.ratio_buffer = std::max(r_.ratio_buffer, medians[2]);
    if (*std::max_element(medians, medians + 3) <= kRatioLimit && most <= kOneRatio) return;
  } else {
    const double limit = 4 * rounding(epsilon_);
    if (worst.worst() <= limit) return;
  }
  // Which of B's errors A's own spread does not explain: what, B's error, A's own, and whether that is one call's.
  struct Excess {
    const char* what;
    double error, own;
    bool one_call;
  };
  using Unexplained = std::vector<Excess>;
  const auto unexplained = [&](const Spread& s) {
    const double floor = rounding(epsilon_);
    const std::tuple<const char*, double, double, double, double> all[] = {
        {"outputs", s.second.output, s.own.output, worst.output, s.worst.output},
        {"gradients", s.second.gradient, s.own.gradient, worst.gradient, s.worst.gradient},
        {"buffers", s.second.buffer, s.own.buffer, worst.buffer, s.worst.buffer}};
    Unexplained found;
    for (const auto& [what, second, own, one, most] : all)
      if (second > 2 * std::max(own, floor))
        found.push_back({what, second, own, false});
      else if (one > kOneCall * std::max(most, floor))
        found.push_back({what, one, most, true});
    return found;
  };
  const auto found = unexplained(
      spread(mode, at, f64, false, worst_call.first, [&](const Spread& s) { return unexplained(s).empty(); }));
  if (f64 && f64_worst <= f64_limit() && !found.empty() &&
      std::all_of(found.begin(), found.end(), [](const Excess& e) { return e.one_call; }) &&
      unstable(mode, at, worst_call.first, worst))
    return note(fmt::format(
        "Errors of one call {} are larger than the first model's own on its inputs, and were accepted because on "
        "inputs that differ in their last digits both models are as far from float64, where they agree.",
        in_mode(mode)));
  for (const auto& [what, error, own, one_call] : found)
    differs(
        fmt::format("The second model's {} are off by {:.1e} {}, the first model's own by at most {:.1e} between "
                    "layouts, thread counts and calls.",
                    what, error, in_mode(mode), own));
  if (found.empty())
    note(
        fmt::format("Errors {} were accepted because they are within the first model's own spread between layouts, "
                    "thread counts and calls.",
                    in_mode(mode)));
}

bool Verifier::unstable(Mode mode, const Start& at, int call, const Errors& worst) {
  const auto& run = at.run;
  Module reference = runs_in(a_, mode, true), a = runs_in(a_, mode, false), b = runs_in(b_, mode, false);
  if (whole_) {
    settle(reference, run, in_double(at.inputs));
    settle(a, run, at.inputs);
  }
  const auto seed = options_.seed + static_cast<uint64_t>(call);
  const auto inputs = vary(at.inputs, call, std::ldexp(1.0, -10), options_.seed);
  std::vector<double> mine[3], theirs[3];
  double seconds = 0;
  for (int n = 0; n < kMovedInputs; ++n) {
    if (n >= 3 && !whole_ && seconds > left()) break;
    const double began = elapsed();
    say(fmt::format("{}: inputs moved, {} of {}", name_of(mode), n + 1, kMovedInputs));
    const auto moved = vary(inputs, n, epsilon_, seed + 1);
    const auto one = [&](Module& m, const Module& original, const std::vector<IValue>& v) {
      StateGuard guard(m, source(original));
      return run(m, v, seed);
    };
    const auto ref = one(reference, a_, in_double(moved));
    for (const bool second : {false, true}) {
      const auto out = second ? one(b, b_, moved) : one(a, a_, moved);
      if (!out.error.empty() || !ref.error.empty()) return false;
      const Errors e = errors(out, ref);
      const double all[] = {e.output, e.gradient, e.buffer};
      for (int q = 0; q < 3; ++q) (second ? theirs : mine)[q].push_back(all[q]);
    }
    seconds = elapsed() - began;
  }
  const double large[] = {worst.output, worst.gradient, worst.buffer};
  for (int q = 0; q < 3; ++q) {
    const auto explained_by = [&](const std::vector<double>& errors) {
      return large[q] <= kOneCall * std::max(*std::max_element(errors.begin(), errors.end()), rounding(epsilon_));
    };
    if (explained_by(mine[q])) continue;
    // A fault of one call is in none of these, and any other in all of them.
    if (!explained_by(theirs[q]) || ratio(median(mine[q]), median(theirs[q])) > kRatioLimit) return false;
  }
  return true;
}

bool Verifier::draws_by_rounding(Mode mode, const Start& at) {
  if (draws_by_rounding_.count(mode)) return draws_by_rounding_[mode];
  const auto& run = at.run;
  auto a = copy(a_, mode, false);
  settle(a, run, at.inputs);
  const auto one = [&](const std::vector<IValue>& inputs, uint64_t seed) {
    StateGuard guard(a, source(a_));
    return run(a, inputs, seed);
  };
  bool& found = draws_by_rounding_[mode];
  for (int s = 0; s < std::max(seeds(), 5) && !found; ++s) {
    say(fmt::format("{}: own draws, seed {}", name_of(mode), s + 1));
    const auto seed = options_.seed + static_cast<uint64_t>(s);
    const auto inputs = vary(at.inputs, s, std::ldexp(1.0, -10), options_.seed);
    const auto ref = one(inputs, seed);
    if (!ref.error.empty()) continue;
    const auto differs = [&](const Outcome& o) { return o.error.empty() && !same_random(o, ref); };
    for (uint64_t v = 1; v <= 2 && !found; ++v) found = differs(one(vary(inputs, 1, epsilon_, seed + v), seed));
    const int threads = at::get_num_threads();
    at::set_num_threads(threads == 1 ? 2 : 1);
    found = found || differs(one(inputs, seed));
    at::set_num_threads(threads);
  }
  return found;
}

}  // namespace tsmem
