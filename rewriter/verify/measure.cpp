// Memory and time of both models.
#include "rewriter/measure/profile.h"
#include "rewriter/measure/training_step.h"
#include "rewriter/verify/verifier.h"

namespace tsmem {

void Verifier::measure() {
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
    return note("Memory and time were not measured for want of time; a thorough verification measures them.");
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

}  // namespace tsmem
