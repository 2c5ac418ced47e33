// What a plan needs at other batch sizes, weights, gradients and the optimizer included.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <vector>

#include "rewriter/plan/planner.h"

namespace tsmem {

// As `request` asks, for the choice of `point`, from steps of the planner's module, whose weights and gradients are
// `module`'s. Steps with other batches are run where there are memory and time for them.
ChosenPlan::Batches batch_memory(Planner& planner, const PlanPoint& point, const torch::jit::Module& module,
                                 const std::vector<c10::IValue>& inputs, const PlanRequest& request);

}  // namespace tsmem
