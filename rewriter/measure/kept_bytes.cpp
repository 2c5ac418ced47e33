#include "rewriter/measure/kept_bytes.h"

#include "rewriter/measure/recorder.h"

namespace tsmem {

std::vector<KeptTensor> kept_bytes(torch::jit::Module& module, const std::vector<c10::IValue>& inputs,
                                   const StepOptions& options) {
  TrainingStep step(module, inputs, options);
  Recording recording = record_forward(step, module, c10::Device(options.device));
  place(recording, {});
  std::vector<KeptTensor> kept;
  for (const size_t i : recording.freed) {
    const auto& a = recording.allocations[i];
    KeptTensor k{a.origin.op, a.origin.module, a.origin.op, a.origin.module, a.bytes};
    if (const auto* keeper = a.kept_by < 0 ? nullptr : maker_of(recording, a.kept_by)) {
      k.keeper = keeper->op;
      k.keeper_module = keeper->module;
    }
    kept.push_back(std::move(k));
  }
  return kept;
}

}  // namespace tsmem
