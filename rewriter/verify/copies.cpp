// The copies of both models that run.
#include <ATen/Context.h>

#include "rewriter/verify/verifier.h"

namespace tsmem {

Module Verifier::fresh(const Module& m, bool f64) {
  auto& copier = copiers_[&m == &b_];
  if (!copier) copier.emplace(m, options_.device);
  Module made = (*copier)(share_ ? with_parameters(m, f64) : nullptr);
  as_written_.erase(made._ivalue().get());  // the address of one that has gone
  if (as_written_only_ && &m == &a_) as_written_.insert(made._ivalue().get());
  return made;
}

const Module* Verifier::with_parameters(const Module& m, bool f64) const {
  const auto& kept = kept_[f64];
  if (const auto& own = kept[&m == &b_]) return &*own;
  const auto& others = kept[&m == &a_];
  return others && r_.state_dict_equal ? &*others : nullptr;
}

Module Verifier::copy(const Module& m, Mode mode, bool f64) {
  auto c = fresh(m, f64);
  if (f64) to_double(c);
  // What runs under autocast is compared with the other under autocast too.
  const Module& other = &m == &a_ ? b_ : a_;
  if (auto dtype = autocast_of(other, options_.method); !dtype.empty() && autocast_of(m, options_.method).empty())
    write_autocast(c, options_.method, dtype);
  c.train(mode == Mode::train);
  return c;
}

Module& Verifier::runs_in(const Module& m, Mode mode, bool f64) {
  auto& kept = kept_[f64][&m == &b_];
  if (!kept || whole_) kept = copy(m, mode, f64);
  kept->train(mode == Mode::train);
  return *kept;
}

Run Verifier::runner(Mode mode, bool input_grad) const {
  return {
      options_.method, c10::Device(options_.device), mode != Mode::no_grad, input_grad, share_, unseen_writes(), true,
      &as_written_};
}

Outcome Verifier::settle(Module& a, Run run, const std::vector<IValue>& inputs, int runs, const Outcome* settled) {
  StateGuard guard(a, source(a_));
  run.backward = false;
  Outcome out;
  for (int i = 0; i < runs; ++i) {
    out = run(a, inputs, options_.seed);
    if (!out.error.empty() || (!code_[0].dropout && !draws(out, options_.seed)) ||
        (settled && same_random(out, *settled)))
      break;
  }
  return out;
}

bool Verifier::draws(const Outcome& out, uint64_t seed) const {
  auto untouched = at::globalContext().defaultGenerator(c10::Device(options_.device)).clone();
  untouched.set_current_seed(seed);
  return !out.random.back().equal(untouched.get_state());
}

}  // namespace tsmem
