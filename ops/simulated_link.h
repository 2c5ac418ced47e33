// A link between the CPU and a host that is not there, for tests and plans of outputs that are offloaded (offload.h).
#pragma once

namespace tsmem {

// Takes tensors on the CPU, and those without data, as if they lay on a device with a link of so many bytes a second to
// the host in each direction: a copy takes its time on the clock, and the host's memory is malloc's, which no meter of
// PyTorch's allocator sees. 0: no more. For the whole process.
__attribute__((visibility("default"))) void simulate_link(double bytes_per_second);
__attribute__((visibility("default"))) double simulated_link();

}  // namespace tsmem
