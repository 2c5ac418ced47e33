// What the allocator does during one training step, from c10::MemoryReportingInfoBase: no hook, no change to the model.
#pragma once
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/jit/api/module.h>
#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tsmem {

struct Event {
  double t;            // seconds since the step began
  int64_t bytes;       // + allocated, - freed
  bool backward;       // phase
  std::string module;  // path of the module that allocated, in forward; in backward that of the forward op it belongs
                       // to, where known
  std::string op;      // the outermost op or autograd node; what is freed carries module and op of its allocation
};

// One op of forward, or one autograd node of backward, that runs inside no other.
struct Span {
  double t, seconds;  // since the step began; of the recorded step, which recording makes slower
  bool backward;
  std::string module, op;
};

// Of what this module itself does, not its children.
struct ModuleMemory {
  std::string path, type;
  int64_t saved_bytes = 0;                           // allocated in forward, alive because backward needs it
  int64_t forward_bytes = 0, backward_bytes = 0;     // allocated there
  double forward_seconds = 0, backward_seconds = 0;  // in ops, of the recorded step
};

struct OpMemory {
  std::string op;
  int64_t saved_bytes, count;  // count: storages
};

struct Profile {
  int64_t input_bytes = 0, parameter_bytes = 0;
  int64_t saved_bytes =
      0;  // alive at the end of forward because backward needs it; no parameters, buffers, inputs, outputs
  int64_t peak_bytes =
      0;  // largest live bytes during forward + backward above what lived before; gradients are allocated before
  double forward_seconds = 0, backward_seconds = 0, step_seconds = 0;  // medians
  bool has_backward = true;           // false: nothing that the output depends on needs a gradient
  std::vector<ModuleMemory> modules;  // every module, parents first; the sums over them are the totals
  std::vector<OpMemory> ops;          // forward ops with saved bytes, most first
  std::vector<Event> timeline;
  std::vector<Span> spans;
  int64_t peak_event = -1;  // the event of `timeline` that reaches the peak; -1: nothing was allocated
};

struct ProfileOptions {
  std::string method = "forward";
  std::string device = "cpu";
  bool train = true;
  bool input_grad = false;  // floating-point inputs need a gradient too
  uint64_t seed = 0;
  int warmup = 3, steps = 5;
  bool timing = true;                                // false: memory alone, one measured step after the warm-up
  bool modules = true;                               // false: the totals alone, which saves a step
  std::function<void(const std::string&)> progress;  // is told what runs now
};

// A deep copy of every attribute of a module tree (values and training flags), of its gradients and of the random
// generators; puts them back when it ends. Of parameters there is no copy where `source` is given, a module with the
// same parameters, or these in another dtype: one that was overwritten is put back from there.
class StateGuard {
 public:
  explicit StateGuard(const torch::jit::Module& module, const torch::jit::Module* source = nullptr);
  ~StateGuard();
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// While it lives, `to` gets the allocator's reports of this thread, and of backward's.
class AllocatorReports {
 public:
  explicit AllocatorReports(std::shared_ptr<c10::DebugInfoBase> to);
  ~AllocatorReports();
  AllocatorReports(const AllocatorReports&) = delete;
  AllocatorReports& operator=(const AllocatorReports&) = delete;

 private:
  const int log_level_;
  c10::DebugInfoGuard guard_;
};

double median(std::vector<double> v);  // 0 of none

// Is told about the phases of a TrainingStep.
struct StepObserver {
  virtual ~StepObserver() = default;
  virtual void started() {}                         // inputs and gradients are allocated, forward is next
  virtual void forward_done(const c10::IValue&) {}  // with the outputs, which live until the end of the step
  virtual void pause(bool) {}                       // true, then false, around work that is no part of a step
  virtual void backward_done() {}
};

// One training step, repeatable: forward, then backward from fixed random gradients of the outputs that were drawn
// before, so that neither a loss nor they count. Gradients of parameters (and inputs) are allocated, zero-filled,
// beforehand, and the module's state is put back at the end (StateGuard). The first call of `run` draws them.
class TrainingStep {
 public:
  // Throws Error(kUsage) for an unknown method or device.
  TrainingStep(torch::jit::Module& module, const std::vector<c10::IValue>& inputs, const ProfileOptions& options);
  ~TrainingStep();

  // Returns whether there was a backward. Throws Error(kBadInput) when the model raises, with its message, or returns
  // no floating-point tensor.
  bool run(StepObserver& observer);
  bool run() {
    StepObserver none;
    return run(none);
  }

  double forward_seconds = 0, backward_seconds = 0;  // of the last run

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Runs training steps and records one of them, the one after the warm-up. Everything is put back as it was.
// Throws Error(kBadInput) when forward or backward raise.
Profile profile(torch::jit::Module& module, const std::vector<c10::IValue>& inputs, const ProfileOptions& options);

// The JSON of `tsmem profile`, with "ops" besides.
nlohmann::json to_json(const Profile& p);

}  // namespace tsmem
