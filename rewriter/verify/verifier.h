// The comparison of two models, A and B (verify.h). Its parts are in files of their own: copies.cpp, choose_inputs.cpp,
// calls.cpp, judge.cpp, spread.cpp, measure.cpp.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "rewriter/clock.h"
#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/measure/state_guard.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/verify/outcome.h"
#include "rewriter/verify/verify.h"

namespace tsmem {

using c10::IValue;
using torch::jit::Module;

enum class Mode { train, eval, no_grad };
inline const char* name_of(Mode m) { return m == Mode::train ? "train" : m == Mode::eval ? "eval" : "no_grad"; }
inline std::string in_mode(Mode m) {
  return m == Mode::no_grad ? "without grad" : fmt::format("in {} mode", name_of(m));
}

// Of a method, with all that it calls.
struct Code {
  size_t longest = 0;    // operators that give tensors in one block, of that with the most
  bool dropout = false;  // it draws random numbers, or may do so from a later call on
  bool data = false;     // it reads .data, by which a parameter may be overwritten and no version count it
  bool no_grad = false;  // it turns grad mode on or off
  double narrow = 0;     // the coarsest rounding that it has whatever the model's dtype: it casts to float32, say
};

// The inputs of a mode's calls, how they are run, and what the first of A's runs on them left behind.
struct Start {
  std::vector<IValue> inputs;
  bool given = true;  // the inputs as they were given
  Run run;
  Outcome first;
  std::string without_input_grad;  // why inputs can't need a gradient, where that is so
};

// The calls of a mode: both models in their own dtype and in float64, and what was found so far.
struct Comparison {
  Mode mode;
  const Start& at;
  Module &a, &b, &a64, &b64;
  bool f64 = true;                     // float64 is compared
  bool over = false;                   // both models raise from here on
  Errors direct = {}, reference = {};  // B's worst against A, and against A in float64
  double f64_worst = 0;
  int worst_call = 0, worst_f64_call = 0;
  std::vector<double> ratios[3] = {};  // of outputs, gradients and buffers
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
  // as_written: A runs without TorchScript's optimiser.
  Verifier(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options,
           bool share, bool as_written);
  VerifyResult run();

 private:
  void say(const std::string& text);
  void differs(const std::string& message);
  void note(const std::string& message);
  // The second model raises where the first does not: whatever else differs, this comes first.
  void raises(const std::string& message);
  double elapsed() const { return seconds_since(started_); }
  double left() const { return limit_ - elapsed(); }
  // A or B may overwrite a parameter and no version count it.
  bool unseen_writes() const { return code_[0].data || code_[1].data; }
  int seeds() const { return options_.seeds > 0 ? options_.seeds : 5; }
  bool unhurried() const { return whole_ || options_.calls > 0; }
  void state();
  void numbers();
  std::string verdict() const;

  // copies.cpp: what runs. Fresh copies have never run.
  // The model that a copy of it takes its parameters from when its state is put back; null where it has its own.
  const Module* source(const Module& m) const { return unseen_writes() ? nullptr : &m; }
  Module fresh(const Module& m, bool f64 = false);
  // A copy that has run, whose parameters are the model's.
  const Module* with_parameters(const Module& m, bool f64) const;
  Module copy(const Module& m, Mode mode, bool f64);
  // The copy that a mode's calls run: one for each mode in the whole check, else the same in all modes (TorchScript's
  // first runs of a module take longer than most that follow).
  Module& runs_in(const Module& m, Mode mode, bool f64);
  Run runner(Mode mode, bool input_grad) const;
  // Runs A until its code is in its final form where it draws random numbers (TorchScript's own dropout draws otherwise
  // from the third call on), and puts its state back. Forward suffices for that. `settled`: another copy's last run,
  // which says that it may end. The run may have an error.
  Outcome settle(Module& a, Run run, const std::vector<IValue>& inputs, int runs = 3, const Outcome* settled = nullptr);
  // Whether a call with this seed has drawn random numbers.
  bool draws(const Outcome& out, uint64_t seed) const;

  // choose_inputs.cpp
  // One run of A, whose state is put back.
  Start start(Module& a, Mode mode, const std::vector<IValue>& inputs, bool given);
  // Steps of A that the whole check takes, those in float64 three times as long.
  double whole_cost() const;
  // The inputs for a mode: those given, or smaller ones where the whole check would take too long.
  Start choose(Module& a, Mode mode);
  Start choose_smaller(Module& a, Mode mode, const Start& given);
  // Whether a run on smaller inputs works like that on those given: it raises nothing, its values are finite, no output
  // is empty, and whatever got a gradient gets one.
  static bool says_as_much(const Start& s, const Start& given);

  // calls.cpp
  void calls(Mode mode);
  // Seconds of the clock by which the calls of a mode end, of which at least one is compared however long it takes.
  double deadline(Mode mode, bool given) const;
  // The calls of a mode, in float64 too. False where B raises.
  bool compare(Mode mode, const Start& at, Module& a, Module& b);
  // A's run before the calls that are compared, where there is time for one, in its own dtype and in float64. `again`:
  // another mode has run in float64.
  std::optional<Outcome> settle_own(Mode mode, const Start& at, Module& a);
  void settle_double(Comparison& now, const std::optional<Outcome>& settled, bool again);
  void leave_out_double(Comparison& now, const std::string& raised);
  // Call number c of both; nothing where B raises.
  std::optional<CallResult> compare_call(Comparison& now, int c);
  // What float64 says of a call: B's error in it, and the errors of A and B in their own dtype against A in it.
  void add_double(Comparison& now, int c, CallResult& call, double f64_error, const Errors& ea, const Errors& eb);
  void add(Compared compared, const Errors& e);
  // Further calls of both after those on smaller inputs: in their own dtype on the inputs given, whose size may take
  // other paths through kernels. One at least in the first mode.
  void compare_given(Mode mode, const Run& run, Module& a, Module& b);
  // What is no matter of degree.
  void compare_sides(const Outcome& a, const Outcome& b, Mode mode);
  // Of the outputs of all calls so far: TorchScript's first calls may give others than its later ones.
  void add_traits(Mode mode, const Outcome& out, bool second);
  void compare_traits(Mode mode);
  // Whether an output of A has required a gradient in every call with grad.
  bool needs_gradient_always(const std::string& output) const;
  bool same_random(const Outcome& a, const Outcome& b) const;
  // Whether copies of both that were never run with gradients draw the same; said in a note. False in other modes.
  bool draws_alike_untrained(Mode mode, const Run& run, const std::vector<IValue>& inputs, uint64_t seed, bool f64);

  // judge.cpp
  // B's error against A in their own dtype has no float64 to be measured by: it may be eight times that of the first
  // model's own runs with other rounding. The first of these mostly says so, the others are run where it does not.
  void judge_given(Mode mode, const std::function<Outcome(Module&, const std::vector<IValue>&)>& one, Module& a,
                   const std::vector<IValue>& inputs, const Outcome& ra, const Errors& e);
  // B's error over A's; where both are rounding it is 1.
  double ratio(double a, double b) const;
  // What A and B may differ by in float64.
  double f64_limit() const;
  // `worst` of B's calls, and which that was, in its own dtype and in float64: against A in float64 where it runs
  // there, else against A.
  void judge(Mode mode, const Start& at, bool f64, double f64_worst, const Errors& worst,
             std::pair<int, int> worst_call, std::vector<double> (&ratios)[3]);
  // Of a call in which B is further from float64 than A's own runs: whether that is the chance of rounding. A model
  // that magnifies rounding errors does so on some inputs and not on others: then A's own errors are as large on inputs
  // that differ from these in their last digits, or B's are and the medians of both are alike.
  bool unstable(Mode mode, const Start& at, int call, const Errors& worst);
  // Whether the first model draws otherwise with inputs that differ in their last digit, or with another thread count:
  // as a detector that samples among the boxes it has found.
  bool draws_by_rounding(Mode mode, const Start& at);

  // spread.cpp
  // Medians over the seeds of B's error and of the worst error among A's variants: inputs changed in their last digit,
  // other thread count, other memory format, a first call. Against A in float64 (or A itself); `wide`: all in float64.
  // B's worst call comes first, as some inputs make any difference a large one. All but the whole check end where the
  // spread is enough.
  Spread spread(Mode mode, const Start& at, bool f64, bool wide, int worst_call,
                const std::function<bool(const Spread&)>& enough);

  // measure.cpp
  // Memory and time of a step with the inputs given. In the whole check after three warm-up steps, times as medians of
  // five; else of the modules that have run already, as many steps as there is time for.
  void measure();

  const Module &a_, &b_;
  const std::vector<IValue>& inputs_;
  const VerifyOptions& options_;
  const Code code_[2];    // A's and B's
  const double epsilon_;  // of the models' own dtype, or of what their code casts to
  const double narrow_;   // of what their code casts to whatever the dtype, also in float64
  const std::string own_dtype_;
  const bool share_;
  const bool as_written_only_;                       // A runs so
  std::set<const c10::ivalue::Object*> as_written_;  // its copies, where it does
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
  std::map<std::tuple<Mode, std::string, Trait::Kind>, std::set<std::string>> traits_[2];  // of outputs of A, of B
  std::string first_error_;
  VerifyResult r_;
};

}  // namespace tsmem
