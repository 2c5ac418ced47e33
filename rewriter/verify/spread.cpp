// How far A's own runs are apart with other rounding.
#include <ATen/Parallel.h>

#include <cmath>

#include "rewriter/measure/profile.h"
#include "rewriter/verify/verifier.h"

namespace tsmem {

Spread Verifier::spread(Mode mode, const Start& at, bool f64, bool wide, int worst_call,
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
  const double e = wide ? std::max(std::numeric_limits<double>::epsilon(), narrow_) : epsilon_;
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
      StateGuard guard(m, source(is_b ? b_ : a_));
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
                if (v.isTensor() && v.toTensor().defined()) v.toTensor().set_data(channels_last(v.toTensor().detach()));
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

}  // namespace tsmem
