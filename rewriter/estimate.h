// Running a model without running it: on LibTorch's meta device, whose tensors have shapes and no memory.
#pragma once

namespace tsmem {

// Makes allocations of the meta device visible to c10::MemoryReportingInfoBase, as the CPU's are; and gives shape
// functions to the ATen operators that have theirs in Python alone (convolutions, norms), with what oneDNN's own
// layouts cost for a while. Once in a process.
void count_meta_allocations();

}  // namespace tsmem
