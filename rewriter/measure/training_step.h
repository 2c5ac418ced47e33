// One training step of a module, the same at every run.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tsmem/profile.h"

namespace tsmem {

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
  // Throws Error(ErrorKind::request) for an unknown method or device.
  TrainingStep(torch::jit::Module& module, const std::vector<c10::IValue>& inputs, const StepOptions& options);
  ~TrainingStep();

  // Returns whether there was a backward. Throws Error(ErrorKind::input) when the model raises, with its message, or
  // returns no floating-point tensor.
  bool run(StepObserver& observer);
  bool run() {
    StepObserver none;
    return run(none);
  }

  // Forward alone: what it keeps goes when the observer has been told that it is done. Throws as run() does where the
  // model raises.
  void run_forward(StepObserver& observer);

  double forward_seconds = 0, backward_seconds = 0;  // of the last run

 private:
  c10::IValue forward(StepObserver& observer);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tsmem
