// Running a model without running it: on LibTorch's meta device, whose tensors have shapes and no memory.
#pragma once
#include <memory>

namespace tsmem {

// As long as somebody holds it, allocations of the meta device are visible to c10::MemoryReportingInfoBase, as the
// CPU's are; and the ATen operators that have their shape functions in Python alone (convolutions, norms) have some
// here, with what oneDNN's own layouts cost for a while. They hold in every thread.
std::shared_ptr<const void> estimate_on_meta();

}  // namespace tsmem
