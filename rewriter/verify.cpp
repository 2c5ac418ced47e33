#include "rewriter/verify.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <sstream>

#include "rewriter/depthwise.h"
#include "rewriter/error.h"
#include "rewriter/inputs.h"
#include "rewriter/measure/profile.h"
#include "rewriter/measure/state_guard.h"
#include "rewriter/outcome.h"
#include "rewriter/rewrite.h"
#include "rewriter/smaller_inputs.h"
#include "rewriter/view.h"

namespace tsmem {
namespace {

using c10::IValue;
using torch::jit::Module;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kF64Limit = 1e-9;   // A and B in float64
constexpr double kRatioLimit = 2.0;  // median of B's error over A's
constexpr double kOneRatio = 50;     // of one call alone: rounding may do that, so A's own spread decides
constexpr double kOneCall = 8;       // B's worst call over the worst of A's own runs

using Clock = std::chrono::steady_clock;

enum class Mode { train, eval, no_grad };
const char* name_of(Mode m) { return m == Mode::train ? "train" : m == Mode::eval ? "eval" : "no_grad"; }
std::string in_mode(Mode m) { return m == Mode::no_grad ? "without grad" : fmt::format("in {} mode", name_of(m)); }

// A model's own message, at the end of a sentence, may have no full stop.
std::string ended(const std::string& text) {
  return text.empty() || std::string(".!?").find(text.back()) != std::string::npos ? text : fmt::format("{}.", text);
}

// Of a method, with all that it calls.
struct Code {
  size_t longest = 0;    // operators in one block, of that with the most
  bool dropout = false;  // it draws random numbers, or may do so from a later call on
};

Code code_of(const Module& module, const std::string& method) {
  Scopes scopes;
  const View view = copy_graph(*toGraphFunction(module.get_method(method).function()).graph(), scopes,
                               [](const Scope*) { return true; });
  Code code;
  std::map<const torch::jit::Block*, size_t> counts;
  for (const auto& [node, _] : view.places) {
    code.longest = std::max(code.longest, ++counts[node->owningBlock()]);
    code.dropout |= std::string_view(node->kind().toUnqualString()).find("dropout") != std::string_view::npos;
  }
  return code;
}

// Of one block: TorchScript's optimiser takes minutes for more, as some of its passes are quadratic in it.
constexpr size_t kMostOperators = 10000;

// The inputs of a mode's calls, how they are run, and what the first of A's runs on them left behind.
struct Start {
  std::vector<IValue> inputs;
  bool given = true;  // the inputs as they were given
  Run run;
  Outcome first;
  std::string without_input_grad;  // why inputs can't need a gradient, where that is so
};

// Medians over the seeds of B's errors and of the worst of A's own runs with other rounding, and the worst of those.
struct Spread {
  Errors second, own, worst;
};

// Of the time there is, what is planned for: some runs take longer than those before them, and files have been loaded.
constexpr double kMargin = 0.8;

class Verifier {
 public:
  // share: of parameters' memory, among copies of a model, and of both where their state is the same.
  Verifier(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options,
           bool share)
      : a_(a),
        b_(b),
        inputs_(inputs),
        options_(options),
        share_(share),
        epsilon_(epsilon_of(a, inputs)),
        own_dtype_(epsilon_ == epsilon_of(at::kDouble)     ? "float64"
                   : epsilon_ == epsilon_of(at::kHalf)     ? "float16"
                   : epsilon_ == epsilon_of(at::kBFloat16) ? "bfloat16"
                                                           : "float32"),
        code_(code_of(a, options.method)),
        started_(Clock::now() -
                 std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.spent))),
        limit_(kMargin * options.seconds),
        whole_(options.thorough.value_or(false)) {
    if (options.train_mode) modes_.push_back(Mode::train);
    if (options.eval_mode) modes_.insert(modes_.end(), {Mode::eval, Mode::no_grad});
  }

  VerifyResult run() {
    state();
    if (b_.find_method(options_.method)) {  // else it is a difference in structure
      numbers();
      if (options_.measure && !raised_) measure();
    }
    r_.equal = r_.differences.empty();
    r_.verdict = verdict();
    r_.thorough = whole_;
    r_.first_step_seconds = step_;
    r_.seconds = elapsed();
    return std::move(r_);
  }

 private:
  void say(const std::string& text) {
    const double parts = static_cast<double>(modes_.size()) + (options_.measure ? 1 : 0);
    if (options_.progress) options_.progress(text, std::min(1.0, (done_ + part_) / parts));
  }
  void differs(const std::string& message) {
    auto text = ended(message);
    if (std::find(r_.differences.begin(), r_.differences.end(), text) == r_.differences.end())
      r_.differences.push_back(text);
  }
  void note(const std::string& message) {
    auto text = ended(message);
    if (std::find(r_.notes.begin(), r_.notes.end(), text) == r_.notes.end()) r_.notes.push_back(text);
  }
  // The second model raises where the first does not: whatever else differs, this comes first.
  void raises(const std::string& message) {
    if (!raised_) r_.differences.insert(r_.differences.begin(), ended(message));
    raised_ = true;
  }

  double elapsed() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }
  double left() const { return limit_ - elapsed(); }
  int seeds() const { return options_.seeds > 0 ? options_.seeds : 5; }
  bool unhurried() const { return whole_ || options_.calls > 0; }

  void state() {
    say("comparing state and structure");
    r_.differences = structure_differences(a_, b_, &r_.state_dict_equal);
  }

  void numbers() {
    for (auto* m : {&a_, &b_})
      if (auto dtype = autocast_of(*m, options_.method);
          !dtype.empty() && autocast_of(m == &a_ ? b_ : a_, options_.method).empty())
        note(fmt::format("The {} model's {} runs under autocast to {}; for the comparison the other's does too.",
                         m == &a_ ? "first" : "second", options_.method, dtype));
    optimised_ = code_.longest <= kMostOperators;
    const torch::jit::GraphOptimizerEnabledGuard guard(optimised_ && torch::jit::getGraphExecutorOptimize());
    if (!optimised_)
      note(
          fmt::format("TorchScript's optimiser was off, as it takes minutes for a block of {} operators; where the "
                      "random generator stands was not compared, as that depends on the optimiser.",
                      code_.longest));
    const FastDepthwise fast;
    for (auto mode : modes_) {
      calls(mode);
      ++done_;
      part_ = 0;
    }
    if (!ran_)
      throw Error(kBadInput,
                  fmt::format("The first model's {} fails with these inputs: {}", options_.method, first_error_));
    if (!r_.gradients_only_in_a.empty() || !r_.gradients_only_in_b.empty()) {
      auto& only = r_.gradients_only_in_a.empty() ? r_.gradients_only_in_b : r_.gradients_only_in_a;
      differs(fmt::format("Only the {} model gives a gradient to '{}'{}.",
                          r_.gradients_only_in_a.empty() ? "second" : "first", only[0],
                          only.size() > 1 ? fmt::format(" and {} more", only.size() - 1) : std::string()));
    }
  }

  Module fresh(const Module& m, bool f64 = false) {
    auto& copier = copiers_[&m == &b_];
    if (!copier) copier.emplace(m, options_.device);
    return (*copier)(share_ ? with_parameters(m, f64) : nullptr);
  }

  // A copy that has run, whose parameters are the model's.
  const Module* with_parameters(const Module& m, bool f64) const {
    const auto& kept = kept_[f64];
    if (const auto& own = kept[&m == &b_]) return &*own;
    const auto& others = kept[&m == &a_];
    return others && r_.state_dict_equal ? &*others : nullptr;
  }

  Module copy(const Module& m, Mode mode, bool f64) {
    auto c = fresh(m, f64);
    if (f64) to_double(c);
    // What runs under autocast is compared with the other under autocast too.
    const Module& other = &m == &a_ ? b_ : a_;
    if (auto dtype = autocast_of(other, options_.method); !dtype.empty() && autocast_of(m, options_.method).empty())
      write_autocast(c, options_.method, dtype);
    c.train(mode == Mode::train);
    return c;
  }

  // The copy that a mode's calls run: one for each mode in the whole check, else the same in all modes (TorchScript's
  // first runs of a module take longer than most that follow).
  Module& runs_in(const Module& m, Mode mode, bool f64) {
    auto& kept = kept_[f64][&m == &b_];
    if (!kept || whole_) kept = copy(m, mode, f64);
    kept->train(mode == Mode::train);
    return *kept;
  }

  Run runner(Mode mode, bool input_grad) const {
    return {options_.method, c10::Device(options_.device), mode != Mode::no_grad, input_grad, share_};
  }

  // Runs A until its code is in its final form where it draws random numbers (TorchScript's own dropout draws otherwise
  // from the third call on), and puts its state back. Forward suffices for that. `settled`: another copy's last run,
  // which says that it may end. The run may have an error.
  Outcome settle(Module& a, Run run, const std::vector<IValue>& inputs, int runs = 3,
                 const Outcome* settled = nullptr) {
    StateGuard guard(a, &a_);
    run.backward = false;
    Outcome out;
    for (int i = 0; i < runs; ++i) {
      out = run(a, inputs, options_.seed);
      if (!out.error.empty() || (!code_.dropout && !draws(out, options_.seed)) ||
          (settled && same_random(out, *settled)))
        break;
    }
    return out;
  }

  // Whether a call with this seed has drawn random numbers.
  bool draws(const Outcome& out, uint64_t seed) const {
    auto untouched = at::globalContext().defaultGenerator(c10::Device(options_.device)).clone();
    untouched.set_current_seed(seed);
    return !out.random.back().equal(untouched.get_state());
  }

  // One run of A, whose state is put back.
  Start start(Module& a, Mode mode, const std::vector<IValue>& inputs, bool given) {
    StateGuard guard(a, &a_);
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

  // Steps of A that the whole check takes, those in float64 three times as long.
  double whole_cost() const {
    double steps = 0;
    for (auto mode : modes_)
      steps += (mode == Mode::no_grad ? 0.4 : 1) * (5 + 8 * std::max(options_.calls > 0 ? options_.calls : 4, seeds()));
    return steps + (options_.measure ? 22 : 0);
  }

  // The inputs for a mode: those given, or smaller ones where the whole check would take too long.
  Start choose(Module& a, Mode mode) {
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

  Start choose_smaller(Module& a, Mode mode, const Start& given) {
    Start chosen = given;
    for (const auto& inputs : smaller_inputs(inputs_)) {
      say(fmt::format("{}: trying inputs of {}", name_of(mode), described(inputs)[0]));
      auto s = start(a, mode, inputs, false);
      if (!says_as_much(s, given)) continue;
      chosen = std::move(s);
      break;
    }
    // One call in float64 with all that belongs to it, in each mode. A smaller picture is small enough.
    const bool picture =
        chosen.inputs[0].isTensor() && 2 * chosen.inputs[0].toTensor().numel() < inputs_[0].toTensor().numel();
    if (const double least = 25 * chosen.first.seconds; !picture && least > 0.6 * left()) {
      auto s = start(a, mode, smaller_inputs(chosen.inputs, 1, 0), false);
      if (says_as_much(s, given) && s.first.seconds < 0.8 * chosen.first.seconds) chosen = std::move(s);
    }
    if (!chosen.given) smaller_ = chosen.inputs;
    return chosen;
  }

  // Whether a run on smaller inputs works like that on those given: it raises nothing, its values are finite, no output
  // is empty, and whatever got a gradient gets one.
  static bool says_as_much(const Start& s, const Start& given) {
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
    std::set<std::string> reached;
    const auto nonzero = [](const Named& g) { return g.value.defined() && size_of(g) > 0; };
    for (const auto& g : s.first.gradients)
      if (nonzero(g)) reached.insert(g.name);
    return std::all_of(given.first.gradients.begin(), given.first.gradients.end(),
                       [&](const Named& g) { return !nonzero(g) || reached.count(g.name); });
  }

  void calls(Mode mode) {
    if (mode == Mode::eval && !unhurried() && iteration_ > std::max(left(), 0.0)) {
      note("Gradients in eval mode were not compared for want of time; --thorough compares them.");
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
    if (!at.without_input_grad.empty())
      note(fmt::format("Gradients of the inputs were not compared {}: {}", in_mode(mode), at.without_input_grad));
    if (compare(mode, at, a, b) && !at.given) compare_given(mode, at.run, a, b);
  }

  // Seconds of the clock by which the calls of a mode end, of which at least one is compared however long it takes.
  double deadline(Mode mode, bool given) const {
    if (unhurried()) return kInfinity;
    // TorchScript changes a model's code up to its third call: these calls come before all but those on the inputs
    // given.
    if (mode == Mode::train && !given) return elapsed() + std::max(0.0, left() - 3 * step_);
    double kept = options_.measure ? 2.5 * step_ : 0;  // for what comes later
    if (!given && mode == modes_[0]) kept += 3 * step_;
    const double share = mode == Mode::train ? (options_.eval_mode ? 0.5 : 1) : mode == Mode::eval ? 0.7 : 1;
    return elapsed() + share * std::max(0.0, left() - kept);
  }

  // The calls of a mode, in float64 too. False where B raises.
  bool compare(Mode mode, const Start& at, Module& a, Module& b) {
    const auto& run = at.run;
    const double end = deadline(mode, at.given);
    // Once more after the runs that chose the inputs.
    const Outcome settled = settle(a, run, at.inputs, whole_ ? 3 : 1);
    if (!settled.error.empty())
      throw Error(kBadInput, fmt::format("The first model's {} fails {} on a later call: {}", options_.method,
                                         in_mode(mode), settled.error));
    const bool again = kept_[1][0].has_value() && !whole_;
    Module &a64 = runs_in(a_, mode, true), &b64 = runs_in(b_, mode, true);
    std::vector<std::unique_ptr<StateGuard>> guards;
    for (Module* m : {&a, &b, &a64, &b64})
      guards.push_back(std::make_unique<StateGuard>(*m, m == &a || m == &a64 ? &a_ : &b_));
    bool f64 = true;
    const auto narrow = [&](const std::string& raised) {
      f64 = false;
      note(fmt::format("The first model does not run in float64 {}, so errors were compared with its own spread: {}",
                       in_mode(mode), raised));
    };
    if (mode == Mode::no_grad && !unhurried() && 0.5 * iteration_ > left()) {
      f64 = false;  // what backward rests on has been compared in float64
    } else if (auto out = settle(a64, run, in_double(at.inputs), again ? 1 : 3, &settled); !out.error.empty()) {
      narrow(out.error);
    }

    std::vector<double> ratios[3];
    double f64_worst = 0;
    Errors direct, reference;  // B's worst against A, and against A in float64
    int worst_call = 0, worst_f64_call = 0;
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
      auto seed = options_.seed + static_cast<uint64_t>(c);
      auto inputs = vary(at.inputs, c, std::ldexp(1.0, -10), options_.seed);
      auto ra = run(a, inputs, seed), rb = run(b, inputs, seed);
      if (!ra.error.empty())
        throw Error(kBadInput, fmt::format("The first model's {} fails on call {} {}: {}", options_.method, c + 1,
                                           in_mode(mode), ra.error));
      if (!rb.error.empty()) {
        raises(fmt::format("The second model's {} fails on call {} {}, where the first model's does not: {}",
                           options_.method, c + 1, in_mode(mode), rb.error));
        return false;
      }
      compare_sides(ra, rb, mode);
      auto wide = in_double(inputs);
      Outcome da, db;
      if (f64) {
        da = run(a64, wide, seed);
        if (!da.error.empty() && c == 0)
          narrow(da.error);
        else if (!da.error.empty())
          throw Error(kBadInput, fmt::format("The first model's {} fails in float64 on call {} {}: {}", options_.method,
                                             c + 1, in_mode(mode), da.error));
      }
      const bool drawn_alike = same_random(ra, rb);
      if (!drawn_alike && !f64) {
        if (draws_by_rounding(mode, at))
          note(fmt::format(
              "How many random numbers are drawn depends on rounding {}: the first model's own draws differ too.",
              in_mode(mode)));
        else
          differs(fmt::format(
              "The random generator is in another state after call {} {}: the models draw random numbers differently.",
              c + 1, in_mode(mode)));
      }
      auto e = errors(rb, ra);
      if (!f64 && e.worst() > direct.worst()) worst_call = c;
      direct.add(e);
      CallResult call{name_of(mode), e.output, e.gradient, e.buffer, kNaN, {kNaN, kNaN}, {kNaN, kNaN}, {kNaN, kNaN}};
      if (f64) {
        const auto ea = errors(ra, da), eb = errors(rb, da);
        ra = rb = Outcome();  // a large model's gradients are large too
        db = run(b64, wide, seed);
        if (!db.error.empty()) {
          raises(
              fmt::format("The second model's {} fails in float64 on call {} {}, where the first model's does not: "
                          "{}",
                          options_.method, c + 1, in_mode(mode), db.error));
          return false;
        }
        if (!same_random(da, db))
          differs(
              fmt::format("The random generator is in another state after call {} {} in float64: the models draw "
                          "random numbers differently.",
                          c + 1, in_mode(mode)));
        else if (!drawn_alike)  // a detector samples among the boxes it has found
          note(fmt::format("How many random numbers are drawn depends on rounding {}: in float64 both draw the same.",
                           in_mode(mode)));
        call.f64_error = errors(db, da).worst();
        if (call.f64_error > f64_worst) worst_f64_call = c;
        f64_worst = std::max(f64_worst, call.f64_error);
        if (eb.worst() > reference.worst()) worst_call = c;
        reference.add(eb);
        double pairs[3][2] = {{ea.output, eb.output}, {ea.gradient, eb.gradient}, {ea.buffer, eb.buffer}};
        for (int k : {0, 1}) {
          call.reference_output[k] = pairs[0][k];
          call.reference_gradient[k] = pairs[1][k];
          call.reference_buffer[k] = pairs[2][k];
        }
        for (int q = 0; q < 3; ++q) ratios[q].push_back(ratio(pairs[q][0], pairs[q][1]));
      }
      if (c < reported) r_.calls.push_back(call);
      ++compared.calls;
      iteration_ = elapsed() - began;
    }
    if (f64 && own_dtype_ != "float64") compared.dtypes.emplace_back("float64");
    add(std::move(compared), direct);
    guards.clear();
    judge(mode, at, f64, f64_worst, f64 ? reference : direct, {worst_call, worst_f64_call}, ratios);
    return true;
  }

  void add(Compared compared, const Errors& e) {
    compared.output_error = e.output;
    compared.gradient_error = e.gradient;
    compared.buffer_error = e.buffer;
    r_.compared.push_back(std::move(compared));
  }

  // Further calls of both after those on smaller inputs: in their own dtype on the inputs given, whose size may take
  // other paths through kernels. One at least in the first mode.
  void compare_given(Mode mode, const Run& run, Module& a, Module& b) {
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
        StateGuard guard(m, &m == &b ? &b_ : &a_);
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
      if (!same_random(ra, rb)) {
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
    if (compared.calls) add(std::move(compared), worst);
  }

  // B's error against A in their own dtype has no float64 to be measured by: it may be eight times that of the first
  // model's own runs with other rounding. The first of these mostly says so, the others are run where it does not.
  void judge_given(Mode mode, const std::function<Outcome(Module&, const std::vector<IValue>&)>& one, Module& a,
                   const std::vector<IValue>& inputs, const Outcome& ra, const Errors& e) {
    Errors own;
    const auto exceeded = [&] {
      const double floor = 4 * epsilon_;
      const std::tuple<const char*, double, double> all[] = {{"outputs", e.output, own.output},
                                                             {"gradients", e.gradient, own.gradient},
                                                             {"buffers", e.buffer, own.buffer}};
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

  // B's error over A's; where both are rounding it is 1.
  double ratio(double a, double b) const {
    double floor = 4 * epsilon_;
    if (std::isinf(a) && std::isinf(b)) return 1;
    return std::max(b, floor) / std::max(a, floor);
  }

  bool same_random(const Outcome& a, const Outcome& b) const {
    // A dropout with p = 0 draws where TorchScript has optimised it, and else not.
    return !optimised_ || std::equal(a.random.begin(), a.random.end(), b.random.begin(), b.random.end(),
                                     [](auto& x, auto& y) { return x.equal(y); });
  }

  // What is no matter of degree.
  void compare_sides(const Outcome& a, const Outcome& b, Mode mode) {
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
  }

  // `worst` of B's calls, and which that was, in its own dtype and in float64: against A in float64 where it runs
  // there, else against A.
  void judge(Mode mode, const Start& at, bool f64, double f64_worst, const Errors& worst,
             std::pair<int, int> worst_call, std::vector<double> (&ratios)[3]) {
    if (f64) {
      f64_worst_ = std::max(f64_worst_, f64_worst);
      compared_in_f64_ = true;
      if (f64_worst > kF64Limit) {
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
                              kF64Limit));
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
      double limit = 16 * epsilon_;
      if (worst.worst() <= limit) return;
    }
    // Which of B's errors A's own spread does not explain: what, B's error, A's own.
    using Unexplained = std::vector<std::tuple<const char*, double, double>>;
    const auto unexplained = [&](const Spread& s) {
      const double floor = 4 * epsilon_;
      const std::tuple<const char*, double, double, double, double> all[] = {
          {"outputs", s.second.output, s.own.output, worst.output, s.worst.output},
          {"gradients", s.second.gradient, s.own.gradient, worst.gradient, s.worst.gradient},
          {"buffers", s.second.buffer, s.own.buffer, worst.buffer, s.worst.buffer}};
      Unexplained found;
      for (const auto& [what, second, own, one, most] : all)
        if (second > 2 * std::max(own, floor))
          found.emplace_back(what, second, own);
        else if (one > kOneCall * std::max(most, floor))
          found.emplace_back(what, one, most);
      return found;
    };
    const auto found = unexplained(
        spread(mode, at, f64, false, worst_call.first, [&](const Spread& s) { return unexplained(s).empty(); }));
    for (const auto& [what, error, own] : found)
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

  // Whether the first model draws otherwise with inputs that differ in their last digit, or with another thread count:
  // as a detector that samples among the boxes it has found.
  bool draws_by_rounding(Mode mode, const Start& at) {
    if (draws_by_rounding_.count(mode)) return draws_by_rounding_[mode];
    const auto& run = at.run;
    auto a = copy(a_, mode, false);
    settle(a, run, at.inputs);
    const auto one = [&](const std::vector<IValue>& inputs, uint64_t seed) {
      StateGuard guard(a, &a_);
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

  // Medians over the seeds of B's error and of the worst error among A's variants: inputs changed in their last digit,
  // other thread count, other memory format, a first call. Against A in float64 (or A itself); `wide`: all in float64.
  // B's worst call comes first, as some inputs make any difference a large one. All but the whole check end where the
  // spread is enough.
  Spread spread(Mode mode, const Start& at, bool f64, bool wide, int worst_call,
                const std::function<bool(const Spread&)>& enough) {
    const auto& run = at.run;
    const auto in = [&](const std::vector<IValue>& v, bool d) { return d ? in_double(v) : v; };
    const auto ready = [&](const Module& m, bool d, bool settled) {
      if (!whole_) return runs_in(m, mode, d);
      auto c = copy(m, mode, d);
      if (settled) settle(c, run, in(at.inputs, d));
      return c;
    };
    Module reference = ready(a_, f64, true), a = ready(a_, wide, true), b = ready(b_, wide, false);
    std::optional<Module> last;  // its weights too in channels_last
    const double e = wide ? std::numeric_limits<double>::epsilon() : epsilon_;
    std::vector<Errors> mine, theirs;
    const auto result = [&] {
      const auto of = [](const std::vector<Errors>& all, double (*choose)(std::vector<double>)) {
        std::vector<double> v[3];
        for (const Errors& one : all) {
          v[0].push_back(one.output);
          v[1].push_back(one.gradient);
          v[2].push_back(one.buffer);
        }
        return Errors{choose(v[0]), choose(v[1]), choose(v[2])};
      };
      const auto most = [](std::vector<double> v) { return *std::max_element(v.begin(), v.end()); };
      return Spread{of(theirs, median), of(mine, median), of(mine, most)};
    };
    std::vector<int> calls = {worst_call};
    for (int c = 0; static_cast<int>(calls.size()) < seeds(); ++c)
      if (c != worst_call) calls.push_back(c);
    double seconds = 0;  // of one seed
    for (const int c : calls) {
      if (c != worst_call && !whole_ && seconds > left()) break;
      const double started = elapsed();
      say(fmt::format("{}: own spread, seed {} of {}", name_of(mode), mine.size() + 1, seeds()));
      const auto seed = options_.seed + static_cast<uint64_t>(c);
      const auto inputs = vary(at.inputs, c, std::ldexp(1.0, -10), options_.seed), own = in(inputs, wide);
      const auto one = [&](Module& m, const std::vector<IValue>& v, bool is_b = false) {
        StateGuard guard(m, is_b ? &b_ : &a_);
        return run(m, v, seed);
      };
      const auto ref = one(reference, in(inputs, f64));
      theirs.push_back(errors(one(b, own, true), ref));
      mine.emplace_back();
      const std::function<Outcome()> variants[] = {
          [&] { return one(a, own); },
          [&] { return one(a, vary(own, 1, e, seed + 1)); },
          [&] {
            const int threads = at::get_num_threads();
            at::set_num_threads(threads == 1 ? 2 : 1);
            auto out = one(a, own);
            at::set_num_threads(threads);
            return out;
          },
          [&] {
            if (!last) {
              last = copy(a_, mode, wide);
              for (const auto& m : last->modules())
                for (auto& v : m._ivalue()->slots())
                  if (v.isTensor() && v.toTensor().defined())
                    v.toTensor().set_data(channels_last(v.toTensor().detach()));
              if (whole_) settle(*last, run, in(at.inputs, wide));
            }
            std::vector<IValue> formatted;
            for (auto& v : own) formatted.push_back(map_tensors(v, channels_last));
            return one(*last, formatted);
          },
          [&] {
            // TorchScript differentiates by itself from the second call on, with other constants than the kernels have
            // (a sixth in float32 in that of hardsigmoid: 3e-8). Not where the first call may draw other random
            // numbers: that would excuse anything.
            auto first = copy(a_, mode, wide);
            auto out = run(first, own, seed);
            if (out.error.empty() && !(wide ? errors(out, ref).worst() < 1e-6 : !draws(out, seed)))
              out.error = "draws otherwise";
            return out;
          },
      };
      for (const auto& variant : variants) {
        // A variant that does not run (a view on channels_last) says nothing.
        if (const auto out = variant(); out.error.empty()) mine.back().add(errors(out, ref));
        if (!whole_ && enough(result())) return result();
      }
      seconds = elapsed() - started;
    }
    return result();
  }

  // Memory and time of a step with the inputs given. In the whole check after three warm-up steps, times as medians of
  // five; else of the modules that have run already, as many steps as there is time for.
  void measure() {
    ProfileOptions o;
    o.method = options_.method;
    o.device = options_.device;
    o.train = options_.train_mode;
    o.seed = options_.seed;
    o.timing = o.modules = false;
    // As they were given, not under the other's autocast.
    const bool warm = !unhurried() && kept_[0][0] && kept_[0][1] &&
                      autocast_of(a_, options_.method).empty() == autocast_of(b_, options_.method).empty();
    if (warm) o.warmup = 0;
    if (!unhurried() && left() < (warm ? 2 : 8) * step_)
      return note("Memory and time were not measured for want of time; --thorough measures them.");
    try {
      Module modules[2] = {warm ? *kept_[0][0] : fresh(a_), warm ? *kept_[0][1] : fresh(b_)};
      bool trains = false;
      for (const auto& p : modules[0].parameters()) trains |= p.requires_grad();
      o.input_grad = !trains;
      for (int k : {0, 1}) {
        say(fmt::format("memory of the {} model", k ? "second" : "first"));
        auto p = profile(modules[k], inputs_, o);
        r_.saved_bytes[k] = p.saved_bytes;
        r_.peak_bytes[k] = p.peak_bytes;
      }
      part_ = 0.5;
      say("timing");
      // In turn, so that whatever else the machine does meets both.
      TrainingStep first(modules[0], inputs_, o), second(modules[1], inputs_, o);
      std::vector<double> seconds[2];
      for (int i = 0; i <= o.steps; ++i) {
        if (!unhurried() && left() < 2 * step_) break;
        for (int k : {0, 1}) {
          auto& step = k ? second : first;
          step.run();
          if (i || warm) seconds[k].push_back(step.forward_seconds + step.backward_seconds);
        }
      }
      for (int k : {0, 1}) r_.step_seconds[k] = seconds[k].empty() ? step_seconds_[k] : median(seconds[k]);
      r_.measured = true;
    } catch (const Error& e) {
      note(fmt::format("Memory and time were not measured: {}", e.what()));
    }
  }

  std::string verdict() const {
    if (!r_.equal)
      return r_.differences.size() == 1
                 ? r_.differences[0]
                 : fmt::format("{} ({} more differences.)", r_.differences[0], r_.differences.size() - 1);
    std::string text = "Equal: state and structure are the same";
    if (compared_in_f64_)
      text += fmt::format(", in float64 results differ by at most {:.1e}, and the median error ratio is at most {:.2f}",
                          f64_worst_, std::max({r_.ratio_output, r_.ratio_gradient, r_.ratio_buffer}));
    else
      text += ", and errors are within rounding or the first model's own spread, for it does not run in float64";
    bool own = std::any_of(r_.notes.begin(), r_.notes.end(),
                           [](auto& n) { return n.find("own spread between") != std::string::npos; });
    return text + (own && compared_in_f64_ ? " or within the first model's own spread." : ".");
  }

  const Module &a_, &b_;
  const std::vector<IValue>& inputs_;
  const VerifyOptions& options_;
  const bool share_;
  const double epsilon_;
  const std::string own_dtype_;
  const Code code_;
  const Clock::time_point started_;
  double limit_;                 // seconds for it all
  double step_ = 0;              // seconds of A's step with the inputs given; 0: not known yet
  double iteration_ = 0;         // seconds of the last call that was compared, with all that belongs to it
  bool optimised_ = true;        // by TorchScript
  bool whole_;                   // the whole check, however long it takes
  std::vector<IValue> smaller_;  // inputs for all but the whole check; none where A takes no others than those given
  std::vector<Mode> modes_;
  std::optional<Copier> copiers_[2];
  std::optional<Module> kept_[2][2];   // copies that ran last: in their own dtype or in float64, A or B
  double step_seconds_[2] = {0, 0};    // of a single step in train mode with the inputs given
  double done_ = 0, part_ = 0;         // modes, and the part of the next
  bool ran_ = false, raised_ = false;  // A somewhere without an error; B with one where A had none
  double f64_worst_ = 0;
  bool compared_in_f64_ = false;
  std::map<Mode, bool> draws_by_rounding_;
  std::string first_error_;
  VerifyResult r_;
};

}  // namespace

VerifyResult verify(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options) {
  require_device(options.device);
  auto typed = check_inputs(a, options.method, inputs);
  if (!options.train_mode && !options.eval_mode) throw Error(kUsage, "There is no mode to verify in.");
  VerifyResult result;
  on_users_values("The models can't be compared on these inputs", [&] {
    const auto started = Clock::now();
    try {
      result = Verifier(a, b, typed, options, true).run();
    } catch (const OverwritesParameter&) {
      auto left = options;
      left.spent += std::chrono::duration<double>(Clock::now() - started).count();
      result = Verifier(a, b, typed, left, false).run();
    }
  });
  return result;
}

}  // namespace tsmem
