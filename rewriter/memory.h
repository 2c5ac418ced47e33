// What the allocator does during one training step, from c10::MemoryReportingInfoBase: no hook, no change to the model.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tsmem {

struct Event {
  double t;           // seconds since the step began
  int64_t bytes;      // + allocated, - freed
  bool backward;      // phase
  std::string module; // path of the module that allocated, in forward; in backward that of the forward op it belongs to, where known
  std::string op;
};

struct ModuleMemory {
  std::string path, type;
  int64_t saved_bytes;     // of what this module itself (not its children) allocated in forward: alive because backward needs it
  int64_t forward_bytes;   // allocated in forward
  int64_t backward_bytes;  // allocated in backward
};

struct Profile {
  int64_t input_bytes = 0, parameter_bytes = 0;
  int64_t saved_bytes = 0;  // alive at the end of forward because backward needs it; no parameters, buffers, inputs, outputs
  int64_t peak_bytes = 0;   // largest live bytes during forward + backward above what lived before; gradients are allocated before
  double forward_seconds = 0, backward_seconds = 0, step_seconds = 0;  // medians
  std::vector<ModuleMemory> modules;
  std::vector<Event> timeline;
};

struct ProfileOptions {
  std::string method = "forward";
  std::string device = "cpu";
  bool train = true;
  uint64_t seed = 0;
  int warmup = 3, steps = 5;
  bool timing = true;  // false: memory alone, one measured step after the warm-up
};

// Runs training steps (forward, loss_of, backward) and records one of them. The module's parameters, buffers and gradients are
// put back as they were. Throws Error(kBadInput) when forward or backward raise.
Profile profile(torch::jit::Module& module, const std::vector<c10::IValue>& inputs, const ProfileOptions& options);

}  // namespace tsmem
