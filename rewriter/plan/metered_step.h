// The bytes that one training step needs, moment by moment.
#pragma once
#include <functional>
#include <vector>

#include "ops/journal.h"
#include "rewriter/measure/training_step.h"
#include "rewriter/plan/step_model.h"

namespace tsmem {

struct StepMemory {
  std::vector<StepModel::Slot> slots;
  int64_t peak = 0;
  int64_t kept = 0;  // live at the end of forward, without outputs
};

// Runs the step, whose device is `device` (without an index: all of its kind count), noting in `journal` what it does.
StepMemory metered(TrainingStep& step, c10::Device device, Journal& journal,
                   const std::function<void()>& at_forward_end = {});

}  // namespace tsmem
