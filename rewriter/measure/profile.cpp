#include "rewriter/measure/profile.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "rewriter/measure/inputs.h"
#include "rewriter/measure/recorder.h"

namespace tsmem {

// Bytes of the distinct storages behind some tensors.
static int64_t storage_bytes(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> seen;
  int64_t bytes = 0;
  for (auto& t : tensors)
    if (t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<int64_t>(t.storage().nbytes());
  return bytes;
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

// The modules of a profile, and the bytes of parameters.
static void add_modules(Profile& p, const torch::jit::Module& module) {
  for (const auto& m : module.named_modules()) p.modules.push_back({m.name, m.value.type()->name()->name()});
  std::vector<at::Tensor> parameters;
  for (const auto& t : module.parameters()) parameters.push_back(t);
  p.parameter_bytes = storage_bytes(parameters);
}

// The step's first call of a copy, in which each op knows its module: the measured module is called as its user would.
static OpModules op_modules_of_first_call(const torch::jit::Module& module, const std::vector<c10::IValue>& inputs,
                                          const ProfileOptions& options) {
  std::stringstream bytes;
  module.save(bytes);
  const c10::Device device(options.device);
  auto copy = torch::jit::load(bytes, device);
  TrainingStep first(copy, inputs, options);
  return record(first, copy, device).op_modules;
}

// Seconds of several steps.
struct StepSeconds {
  std::vector<double> forward, backward, both;
  void add(const TrainingStep& step) {
    forward.push_back(step.forward_seconds);
    backward.push_back(step.backward_seconds);
    both.push_back(step.forward_seconds + step.backward_seconds);
  }
  void put_medians(Profile& p) const {
    p.forward_seconds = median(forward);
    p.backward_seconds = median(backward);
    p.step_seconds = median(both);
  }
};

static void add_seconds(Profile& p, TrainingStep& step, const ProfileOptions& options,
                        const std::function<void(const std::string&)>& say) {
  StepSeconds seconds;
  for (int i = 0; i < std::max(options.steps, 1); ++i) {
    say(fmt::format("timing step {} of {}", i + 1, options.steps));
    step.run();
    seconds.add(step);
  }
  seconds.put_medians(p);
}

TimeRatio time_in_turns(torch::jit::Module& a, Profile& profile_a, torch::jit::Module& b, Profile& profile_b,
                        const std::vector<c10::IValue>& inputs, const ProfileOptions& options) {
  TrainingStep steps[] = {{a, inputs, options}, {b, inputs, options}};
  StepSeconds seconds[2];
  std::vector<double> ratios;
  // The first pair warms up: what was freed in between is allocated again.
  for (int i = 0; i <= std::max(options.steps, 1); ++i) {
    if (options.progress) options.progress(fmt::format("timing pair {} of {}", i, options.steps));
    for (const int turn : {0, 1}) {
      const int k = (i + turn) % 2;
      steps[k].run();
      if (i) seconds[k].add(steps[k]);
    }
    if (i) ratios.push_back(seconds[1].both.back() / seconds[0].both.back());
  }
  seconds[0].put_medians(profile_a);
  seconds[1].put_medians(profile_b);
  std::sort(ratios.begin(), ratios.end());
  return {median(ratios), ratios[ratios.size() / 4], ratios[ratios.size() - 1 - ratios.size() / 4],
          static_cast<int>(ratios.size())};
}

// What the operators have tried in this process (ops/cuda/trial.h); nothing on a device without such kernels.
static std::vector<std::string> ways_on(const c10::Device& device) {
  const auto op = c10::Dispatcher::singleton().findSchema({"tsmem::_ways", ""});
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  if (!op || !op->hasKernelForDispatchKey(key)) return {};
  return op->typed<std::vector<std::string>(const at::Tensor&)>().call(at::empty({0}, device));
}

Profile profile(torch::jit::Module& module, const std::vector<c10::IValue>& inputs, const ProfileOptions& options) {
  const auto say = [&](const std::string& text) {
    if (options.progress) options.progress(text);
  };
  Profile p;
  add_modules(p, module);
  p.input_bytes = storage_bytes(all_tensors(c10::ivalue::Tuple::create(inputs)));
  TrainingStep step(module, inputs, options);
  for (int i = 0; i < options.warmup; ++i) {
    say(fmt::format("warm-up step {} of {}", i + 1, options.warmup));
    step.run();
  }
  say("recording a step");
  Recording recording = record(step, module, c10::Device(options.device));
  OpModules known;
  if (options.modules && !recording.graphs.empty()) {
    say("finding the modules of differentiated graphs");
    known = op_modules_of_first_call(module, inputs, options);
  }
  place(recording, known);
  add_to(p, std::move(recording));
  if (options.timing) add_seconds(p, step, options, say);
  p.ways = ways_on(c10::Device(options.device));
  return p;
}

}  // namespace tsmem
