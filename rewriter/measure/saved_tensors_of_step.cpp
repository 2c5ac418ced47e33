#include "rewriter/measure/saved_tensors_of_step.h"

#include "rewriter/measure/recorder.h"

namespace tsmem {

std::vector<SavedTensor> saved_tensors_of_step(torch::jit::Module& module, const std::vector<c10::IValue>& inputs,
                                               const StepOptions& options) {
  TrainingStep step(module, inputs, options);
  Recording recording = record_forward(step, module, c10::Device(options.device));
  place(recording, {});
  std::vector<SavedTensor> tensors;
  for (const size_t i : recording.freed) {
    const auto& a = recording.allocations[i];
    SavedTensor t{a.origin.op, a.origin.module, a.origin.op, a.origin.module, a.bytes};
    if (const auto* keeper = a.kept_by < 0 ? nullptr : maker_of(recording, a.kept_by)) {
      t.keeper = keeper->op;
      t.keeper_module = keeper->module;
    }
    tensors.push_back(std::move(t));
  }
  return tensors;
}

}  // namespace tsmem
