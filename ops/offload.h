// Outputs that wait for backward in the host's memory: they are copied there beside what runs, once they are made, and
// fetched ahead of their use.
#pragma once
#include "recompute.h"

namespace tsmem {

// Begins to copy `output`, the result of a recorded op, to the host, and returns what makes it again: by a copy back.
// Null where it stays: on the CPU, under the capture of a CUDA graph, in backward, and for tensors of other kinds.
// Two tensors at most are on their way at once in either direction; who makes more waits for the first.
Make offloaded(const at::Tensor& output);

}  // namespace tsmem
