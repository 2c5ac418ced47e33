// Measuring a training step, or estimating it from shapes: from the steps of a rewritten module and of the original to
// a StepModel.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <string>
#include <vector>

#include "ops/recompute_argument.h"
#include "rewriter/measure/training_step.h"
#include "rewriter/plan/metered_step.h"
#include "rewriter/plan/step_model.h"
#include "rewriter/rewrite/rewrite.h"

namespace tsmem {

// A training step of a module that was rewritten at Level::plan, to be run under one choice after another.
struct TrialStep {
  TrialStep(torch::jit::Module& module, std::vector<Site> sites, const std::vector<c10::IValue>& inputs,
            const StepOptions& run);

  // Writes a choice into the module, for a journal: an attribute tells its site too (ops/recompute_argument.h).
  void choose(const Choice& choice);

  std::vector<Site> sites;
  std::vector<torch::jit::Module> owners;  // of each site
  TrainingStep step;
};

// What an operator is told of an output's fate.
Recompute recompute_of(Fate fate);

struct Measurement {
  StepModel model;
  StepMemory base, original;  // the rewritten module under the base choice, and the original
  double original_seconds = 0;
};

struct MeasurementOptions {
  c10::Device device;
  double link = 0;                                   // as StepModel::link
  bool estimate = false;                             // seconds from FLOPs and bytes: the steps run on the meta device
  std::function<void(const std::string&)> progress;  // is told what runs now
};

Measurement measure(TrialStep& rewritten, TrainingStep& original, const MeasurementOptions& options);

}  // namespace tsmem
