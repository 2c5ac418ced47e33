// Autocast on devices for which we have no lists of what it casts: refused, as an op would else compute in another
// dtype than PyTorch's.
#include <ATen/core/dispatch/Dispatcher.h>

#include "composed/composed.h"

namespace tsmem::composed {

static void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": tsmem knows autocast of the CPU and of CUDA alone, and not of this device. Restore the "
      "original (tsmem rewrite --restore), or train without autocast.");
}

void refuse_autocast(torch::Library& m, c10::DispatchKey key) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string_view full = name.name;
    if (full.starts_with("tsmem::") && !full.starts_with("tsmem::_"))
      m.impl(c10::toString(name).c_str(), key, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace tsmem::composed
