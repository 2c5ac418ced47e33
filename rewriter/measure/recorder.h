// Recording a training step: every block that the allocator gives out and takes back, every op and every autograd node.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include "rewriter/measure/recording.h"
#include "rewriter/measure/training_step.h"

namespace tsmem {

// Runs the step, which is `module`'s, once. device: without an index all of its kind count.
Recording record(TrainingStep& step, const torch::jit::Module& module, c10::Device device);

// Forward alone. Then the nodes of the graph let go of what they keep, the last one first, as backward would.
Recording record_forward(TrainingStep& step, const torch::jit::Module& module, c10::Device device);

}  // namespace tsmem
