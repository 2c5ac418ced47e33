// The calls of a mode: both models, in their own dtype and in float64.
#include <cmath>

#include "rewriter/verify/verifier.h"

namespace tsmem {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void Verifier::calls(Mode mode) {
  if (mode == Mode::eval && !unhurried() && iteration_ > std::max(left(), 0.0)) {
    note("Gradients in eval mode were not compared for want of time; a thorough verification compares them.");
    return;
  }
  say(fmt::format("{}: first calls", name_of(mode)));
  Module& a = runs_in(a_, mode, false);
  const Start at = choose(a, mode);
  Module& b = runs_in(b_, mode, false);
  if (const auto& raised = at.first.error; !raised.empty()) {
    if (first_error_.empty()) first_error_ = raised;
    auto other = at.run(b, inputs_, options_.seed);
    if (other.error.empty())
      differs(fmt::format("The first model raises {} and the second does not: {}", in_mode(mode), raised));
    else
      note(fmt::format("Nothing was compared {}, where both models raise: {}", in_mode(mode), raised));
    return;
  }
  ran_ = true;
  add_traits(mode, at.first, false);
  if (!at.without_input_grad.empty())
    note(fmt::format("Gradients of the inputs were not compared {}: {}", in_mode(mode), at.without_input_grad));
  if (compare(mode, at, a, b) && !at.given) compare_given(mode, at.run, a, b);
}

double Verifier::deadline(Mode mode, bool given) const {
  if (unhurried()) return std::numeric_limits<double>::infinity();
  // TorchScript changes a model's code up to its third call: these calls come before all but those on the inputs
  // given.
  if (mode == Mode::train && !given) return elapsed() + std::max(0.0, left() - 3 * step_);
  double kept = options_.measure ? 2.5 * step_ : 0;  // for what comes later
  if (!given && mode == modes_[0]) kept += 3 * step_;
  const double share = mode == Mode::train ? (options_.eval_mode ? 0.5 : 1) : mode == Mode::eval ? 0.7 : 1;
  return elapsed() + share * std::max(0.0, left() - kept);
}

std::optional<Outcome> Verifier::settle_own(Mode mode, const Start& at, Module& a) {
  // Once more after the runs that chose the inputs. Where little time is left, only for what draws random numbers.
  if (!unhurried() && 25 * at.first.seconds >= left() && !code_[0].dropout && !draws(at.first, options_.seed))
    return {};
  Outcome settled = settle(a, at.run, at.inputs, whole_ ? 3 : 1);
  if (!settled.error.empty())
    throw Error(ErrorKind::input, fmt::format("The first model's {} fails {} on a later call: {}", options_.method,
                                              in_mode(mode), settled.error));
  return settled;
}

void Verifier::settle_double(Comparison& now, const std::optional<Outcome>& settled, bool again) {
  if (now.mode == Mode::no_grad && !unhurried() && 0.5 * iteration_ > left()) {
    now.f64 = false;  // what backward rests on has been compared in float64
  } else if (settled) {
    const Outcome out = settle(now.a64, now.at.run, in_double(now.at.inputs), again ? 1 : 3, &*settled);
    if (!out.error.empty()) leave_out_double(now, out.error);
  }
}

void Verifier::leave_out_double(Comparison& now, const std::string& raised) {
  now.f64 = false;
  note(fmt::format("The first model does not run in float64 {}, so errors were compared with its own spread: {}",
                   in_mode(now.mode), raised));
}

bool Verifier::compare(Mode mode, const Start& at, Module& a, Module& b) {
  const double end = deadline(mode, at.given);
  const std::optional<Outcome> settled = settle_own(mode, at, a);
  const bool again = kept_[1][0].has_value() && !whole_;
  Comparison now{mode, at, a, b, runs_in(a_, mode, true), runs_in(b_, mode, true)};
  std::vector<std::unique_ptr<StateGuard>> guards;
  for (Module* m : {&now.a, &now.b, &now.a64, &now.b64})
    guards.push_back(std::make_unique<StateGuard>(*m, source(m == &now.a || m == &now.a64 ? a_ : b_)));
  settle_double(now, settled, again);

  Compared compared{name_of(mode), at.given, described(at.inputs), 0, {own_dtype_}};
  const int reported = options_.calls > 0 ? options_.calls : 4;
  const bool more = mode != Mode::no_grad && (whole_ || options_.seeds > 0);
  const int runs = more ? std::max(reported, seeds()) : reported;
  for (int c = 0; c < runs; ++c) {
    // The first call of all compiles code, so it says less of the next.
    if (c > 0 && elapsed() + (c == 1 ? 0.3 : 1) * iteration_ > end) break;
    const double began = elapsed();
    part_ = static_cast<double>(c) / runs;
    say(fmt::format("{}: call {} of {}", name_of(mode), c + 1, runs));
    const std::optional<CallResult> call = compare_call(now, c);
    if (now.over) break;
    if (!call) return false;
    if (c < reported) r_.calls.push_back(*call);
    ++compared.calls;
    iteration_ = elapsed() - began;
  }
  if (now.f64 && own_dtype_ != "float64") compared.dtypes.emplace_back("float64");
  add(std::move(compared), now.direct);
  compare_traits(mode);
  guards.clear();
  judge(mode, at, now.f64, now.f64_worst, now.f64 ? now.reference : now.direct, {now.worst_call, now.worst_f64_call},
        now.ratios);
  return true;
}

std::optional<CallResult> Verifier::compare_call(Comparison& now, int c) {
  const Mode mode = now.mode;
  const auto seed = options_.seed + static_cast<uint64_t>(c);
  const auto inputs = vary(now.at.inputs, c, std::ldexp(1.0, -10), options_.seed);
  Outcome ra = now.at.run(now.a, inputs, seed), rb = now.at.run(now.b, inputs, seed);
  // A module may keep something of a call's graph for later ones (LeViT its biases, in eval mode).
  if (c > 0 && !ra.error.empty() && !rb.error.empty()) {
    note(fmt::format("From call {} on nothing was compared {}, where both models raise: {}", c + 1, in_mode(mode),
                     ra.error));
    now.over = true;
    return {};
  }
  if (!ra.error.empty())
    throw Error(ErrorKind::input, fmt::format("The first model's {} fails on call {} {}: {}", options_.method, c + 1,
                                              in_mode(mode), ra.error));
  if (!rb.error.empty()) {
    raises(fmt::format("The second model's {} fails on call {} {}, where the first model's does not: {}",
                       options_.method, c + 1, in_mode(mode), rb.error));
    return {};
  }
  compare_sides(ra, rb, mode);
  const auto wide = in_double(inputs);
  Outcome da;
  if (now.f64) {
    da = now.at.run(now.a64, wide, seed);
    if (!da.error.empty() && c == 0)
      leave_out_double(now, da.error);
    else if (!da.error.empty())
      throw Error(ErrorKind::input, fmt::format("The first model's {} fails in float64 on call {} {}: {}",
                                                options_.method, c + 1, in_mode(mode), da.error));
  }
  const bool drawn_alike = same_random(ra, rb) || draws_alike_untrained(mode, now.at.run, inputs, seed, false);
  if (!drawn_alike && !now.f64) {
    if (draws_by_rounding(mode, now.at))
      note(fmt::format(
          "How many random numbers are drawn depends on rounding {}: the first model's own draws differ too.",
          in_mode(mode)));
    else
      differs(fmt::format(
          "The random generator is in another state after call {} {}: the models draw random numbers differently.",
          c + 1, in_mode(mode)));
  }
  const auto e = errors(rb, ra);
  if (!now.f64 && e.worst() > now.direct.worst()) now.worst_call = c;
  now.direct.add(e);
  CallResult call{name_of(mode), e.output, e.gradient, e.buffer, kNaN, {kNaN, kNaN}, {kNaN, kNaN}, {kNaN, kNaN}};
  if (!now.f64) return call;

  const Errors ea = errors(ra, da), eb = errors(rb, da);
  ra = rb = Outcome();  // a large model's gradients are large too
  const Outcome db = now.at.run(now.b64, wide, seed);
  if (!db.error.empty()) {
    raises(fmt::format("The second model's {} fails in float64 on call {} {}, where the first model's does not: {}",
                       options_.method, c + 1, in_mode(mode), db.error));
    return {};
  }
  if (!same_random(da, db) && !draws_alike_untrained(mode, now.at.run, wide, seed, true))
    differs(
        fmt::format("The random generator is in another state after call {} {} in float64: the models draw "
                    "random numbers differently.",
                    c + 1, in_mode(mode)));
  else if (!drawn_alike)  // a detector samples among the boxes it has found
    note(fmt::format("How many random numbers are drawn depends on rounding {}: in float64 both draw the same.",
                     in_mode(mode)));
  add_double(now, c, call, errors(db, da).worst(), ea, eb);
  return call;
}

void Verifier::add_double(Comparison& now, int c, CallResult& call, double f64_error, const Errors& ea,
                          const Errors& eb) {
  call.f64_error = f64_error;
  if (f64_error > now.f64_worst) now.worst_f64_call = c;
  now.f64_worst = std::max(now.f64_worst, f64_error);
  if (eb.worst() > now.reference.worst()) now.worst_call = c;
  now.reference.add(eb);
  const double pairs[3][2] = {{ea.output, eb.output}, {ea.gradient, eb.gradient}, {ea.buffer, eb.buffer}};
  for (int k : {0, 1}) {
    call.reference_output[k] = pairs[0][k];
    call.reference_gradient[k] = pairs[1][k];
    call.reference_buffer[k] = pairs[2][k];
  }
  for (int q = 0; q < 3; ++q) now.ratios[q].push_back(ratio(pairs[q][0], pairs[q][1]));
}

void Verifier::add(Compared compared, const Errors& e) {
  compared.output_error = e.output;
  compared.gradient_error = e.gradient;
  compared.buffer_error = e.buffer;
  r_.compared.push_back(std::move(compared));
}

void Verifier::compare_given(Mode mode, const Run& run, Module& a, Module& b) {
  const bool first = mode == modes_[0];
  const double call = (mode == Mode::no_grad ? 0.4 : 1) * 3 * step_, kept = options_.measure ? 2.5 * step_ : 0;
  Compared compared{name_of(mode), true, described(inputs_), 0, {own_dtype_}};
  Errors worst;
  for (int c = 0; c < (first ? 2 : 1); ++c) {
    if (!(first && c == 0) && left() < call + kept) break;
    say(fmt::format("{}: call {} on the inputs given", name_of(mode), c + 1));
    const auto seed = options_.seed + static_cast<uint64_t>(c);
    const auto inputs = vary(inputs_, c, std::ldexp(1.0, -10), options_.seed);
    const auto one = [&](Module& m, const std::vector<IValue>& v) {
      StateGuard guard(m, source(&m == &b ? b_ : a_));
      return run(m, v, seed);
    };
    const auto ra = one(a, inputs), rb = one(b, inputs);
    if (!ra.error.empty())
      return note(fmt::format("The first model raises {} on the inputs given: {}", in_mode(mode), ra.error));
    if (!rb.error.empty())
      return raises(
          fmt::format("The second model's {} fails {} on the inputs given, where the first model's does "
                      "not: {}",
                      options_.method, in_mode(mode), rb.error));
    if (mode == Mode::train) {
      step_seconds_[0] = ra.seconds;
      step_seconds_[1] = rb.seconds;
    }
    compare_sides(ra, rb, mode);
    const bool drawn_alike = same_random(ra, rb) || draws_alike_untrained(mode, run, inputs, seed, false);
    if (!drawn_alike) {
      const Start given{inputs_, true, run, {}, ""};
      if (draws_by_rounding(mode, given))
        return note(fmt::format("How many random numbers are drawn on the inputs given depends on rounding {}.",
                                in_mode(mode)));
      return differs(
          fmt::format("The random generator is in another state after a call on the inputs given {}: the "
                      "models draw random numbers differently.",
                      in_mode(mode)));
    }
    const auto e = errors(rb, ra);
    worst.add(e);
    ++compared.calls;
    if (e.worst() > 16 * epsilon_) judge_given(mode, one, a, inputs, ra, e);
  }
  compare_traits(mode);
  if (compared.calls) add(std::move(compared), worst);
}

bool Verifier::same_random(const Outcome& a, const Outcome& b) const {
  // A dropout with p = 0 draws where TorchScript has optimised it, and else not.
  return !optimised_ || std::equal(a.random.begin(), a.random.end(), b.random.begin(), b.random.end(),
                                   [](auto& x, auto& y) { return x.equal(y); });
}

bool Verifier::draws_alike_untrained(Mode mode, const Run& run, const std::vector<IValue>& inputs, uint64_t seed,
                                     bool f64) {
  if (mode != Mode::no_grad || !code_[0].dropout) return false;
  Module a = copy(a_, mode, f64), b = copy(b_, mode, f64);
  const Outcome ra = run(a, inputs, seed), rb = run(b, inputs, seed);
  if (!ra.error.empty() || !rb.error.empty() || !same_random(ra, rb)) return false;
  note(
      "Without gradients TorchScript draws random numbers for dropouts of p = 0 in a model that was trained before; "
      "where none was, both models draw the same.");
  return true;
}

void Verifier::compare_sides(const Outcome& a, const Outcome& b, Mode mode) {
  if (mode == Mode::no_grad && worst(b.inputs, a.inputs) > 16 * epsilon_)
    differs("The models change their inputs in place differently.");
  std::map<std::string, bool> in_a, in_b;
  for (auto& g : a.gradients) in_a[g.name] = g.value.defined();
  for (auto& g : b.gradients) in_b[g.name] = g.value.defined();
  auto only = [](std::map<std::string, bool>& x, std::map<std::string, bool>& y, std::vector<std::string>& out) {
    for (auto& [name, defined] : x)
      if (defined && !y[name] && std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  };
  only(in_a, in_b, r_.gradients_only_in_a);
  only(in_b, in_a, r_.gradients_only_in_b);
  add_traits(mode, a, false);
  add_traits(mode, b, true);
}

void Verifier::add_traits(Mode mode, const Outcome& out, bool second) {
  for (const Trait& t : out.traits) traits_[second][{mode, t.output, t.kind}].insert(t.text);
}

bool Verifier::needs_gradient_always(const std::string& output) const {
  // Code that TorchScript has optimised forgets no_grad, and says that a result of what needs no gradient requires one
  // where a neighbour does. A's first call of all is not optimised.
  if (code_[0].no_grad || code_[1].no_grad) return false;
  return std::all_of(traits_[0].begin(), traits_[0].end(), [&](const auto& seen) {
    const auto& [mode, of, kind] = seen.first;
    return mode == Mode::no_grad || of != output || kind != Trait::Kind::requires_grad ||
           !seen.second.count(kRequiresNone);
  });
}

void Verifier::compare_traits(Mode mode) {
  for (const auto& [key, theirs] : traits_[1]) {
    const auto& [in, output, kind] = key;
    const auto ours = traits_[0].find(key);
    if (in != mode || ours == traits_[0].end()) continue;
    if (kind == Trait::Kind::requires_grad && mode == Mode::no_grad) continue;
    if (kind == Trait::Kind::requires_grad && !needs_gradient_always(output)) continue;
    for (const std::string& text : theirs)
      if (!ours->second.count(text))
        differs(fmt::format("The second model's {} {} {}, the first model's {}.", output, text, in_mode(mode),
                            *ours->second.begin()));
  }
}

}  // namespace tsmem
