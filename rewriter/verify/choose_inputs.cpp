// The inputs that the models are compared on: those given, or smaller ones where these take too long.
#include <cmath>
#include <set>

#include "rewriter/verify/smaller_inputs.h"
#include "rewriter/verify/verifier.h"

namespace tsmem {

Start Verifier::start(Module& a, Mode mode, const std::vector<IValue>& inputs, bool given) {
  StateGuard guard(a, source(a_));
  Start s{inputs, given, runner(mode, true), {}, ""};
  s.first = s.run(a, inputs, options_.seed);
  if (s.first.error.empty() || mode == Mode::no_grad) return s;
  // Code that changes its input in place can't have an input that needs a gradient.
  const auto raised = s.first.error;
  s.run.input_grad = false;
  s.first = s.run(a, inputs, options_.seed);
  if (s.first.error.empty()) s.without_input_grad = raised;
  return s;
}

double Verifier::whole_cost() const {
  double steps = 0;
  for (auto mode : modes_)
    steps += (mode == Mode::no_grad ? 0.4 : 1) * (5 + 8 * std::max(options_.calls > 0 ? options_.calls : 4, seeds()));
  return steps + (options_.measure ? 22 : 0);
}

Start Verifier::choose(Module& a, Mode mode) {
  if (step_ == 0) {
    auto s = start(a, mode, inputs_, true);
    if (!s.first.error.empty()) return s;
    step_ = s.first.seconds;
    limit_ = std::max(limit_, kMargin * 10 * step_);
    const auto fits = [&] { return whole_cost() * step_ < 0.9 * left(); };
    // First runs compile code, which says nothing of a small model.
    for (int i = 0; i < 2 && !whole_ && !fits() && step_ < 3 && left() > 0.8 * limit_; ++i) {
      const auto again = start(a, mode, inputs_, true).first;
      if (again.error.empty()) step_ = std::min(step_, again.seconds);
    }
    if (!options_.thorough) whole_ = fits();
    if (whole_) return s;
    return choose_smaller(a, mode, s);
  }
  if (!smaller_.empty()) {
    auto s = start(a, mode, smaller_, false);
    if (s.first.error.empty()) return s;
  }
  return start(a, mode, inputs_, true);
}

Start Verifier::choose_smaller(Module& a, Mode mode, const Start& given) {
  Start chosen = given;
  const auto is_smaller = [](const std::vector<IValue>& inputs, const std::vector<IValue>& than) {
    return described(inputs) != described(than);
  };
  for (const auto& inputs : smaller_inputs(inputs_)) {
    if (!is_smaller(inputs, inputs_)) continue;
    say(fmt::format("{}: trying inputs of {}", name_of(mode), described(inputs)[0]));
    auto s = start(a, mode, inputs, false);
    if (!says_as_much(s, given)) continue;
    chosen = std::move(s);
    break;
  }
  // One call in float64 with all that belongs to it, in each mode. A smaller picture is small enough.
  const bool picture =
      chosen.inputs[0].isTensor() && 2 * chosen.inputs[0].toTensor().numel() < inputs_[0].toTensor().numel();
  const auto one_row = smaller_inputs(chosen.inputs, 1, 0);
  if (const double least = 25 * chosen.first.seconds;
      !picture && least > 0.6 * left() && is_smaller(one_row, chosen.inputs)) {
    auto s = start(a, mode, one_row, false);
    if (says_as_much(s, given) && s.first.seconds < 0.8 * chosen.first.seconds) chosen = std::move(s);
  }
  if (!chosen.given) smaller_ = chosen.inputs;
  return chosen;
}

bool Verifier::says_as_much(const Start& s, const Start& given) {
  if (!s.first.error.empty() || s.run.input_grad != given.run.input_grad) return false;
  const auto finite = [](const Named& v) {
    return !v.value.defined() || !v.value.is_floating_point() || std::isfinite(norm_of(v.value));
  };
  const auto all_finite = [&](const Outcome& o) {
    return std::all_of(o.outputs.begin(), o.outputs.end(), finite) &&
           std::all_of(o.gradients.begin(), o.gradients.end(), finite);
  };
  if (!all_finite(s.first) && all_finite(given.first)) return false;
  for (const auto& v : s.first.outputs)
    if (v.value.numel() == 0) return false;
  std::set<std::string> reached, named;  // of a shorter list there are fewer inputs
  const auto nonzero = [](const Named& g) { return g.value.defined() && size_of(g) > 0; };
  for (const auto& g : s.first.gradients) {
    named.insert(g.name);
    if (nonzero(g)) reached.insert(g.name);
  }
  return std::all_of(given.first.gradients.begin(), given.first.gradients.end(),
                     [&](const Named& g) { return !nonzero(g) || reached.count(g.name) || !named.count(g.name); });
}

}  // namespace tsmem
