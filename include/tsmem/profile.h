// What a training step of a module needs: bytes moment by moment and module by module, and time.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tsmem/api.h"
#include "tsmem/error.h"

namespace tsmem {

struct Event {
  double t;            // seconds since the step began
  int64_t bytes;       // + allocated, - freed
  bool backward;       // phase
  std::string module;  // path of the module that allocated, in forward; in backward that of the forward op it belongs
                       // to, where known
  std::string op;      // the outermost op or autograd node; what is freed carries module and op of its allocation
};

// One op of forward, or one autograd node of backward, that runs inside no other.
struct Span {
  double t, seconds;  // since the step began; of the recorded step, which recording makes slower
  bool backward;
  std::string module, op;
};

// Of what this module itself does, not its children.
struct ModuleMemory {
  std::string path, type;
  int64_t saved_bytes = 0;                           // allocated in forward, alive because backward needs it
  int64_t forward_bytes = 0, backward_bytes = 0;     // allocated there
  double forward_seconds = 0, backward_seconds = 0;  // in ops, of the recorded step
};

struct OpMemory {
  std::string op;
  int64_t saved_bytes, count;  // count: storages
};

struct Profile {
  int64_t input_bytes = 0, parameter_bytes = 0;
  int64_t saved_bytes =
      0;  // alive at the end of forward because backward needs it; no parameters, buffers, inputs, outputs
  int64_t peak_bytes =
      0;  // largest live bytes during forward + backward above what lived before; gradients are allocated before
  double forward_seconds = 0, backward_seconds = 0, step_seconds = 0;  // medians
  bool has_backward = true;           // false: nothing that the output depends on needs a gradient
  std::vector<ModuleMemory> modules;  // every module, parents first; the sums over them are the totals
  std::vector<OpMemory> ops;          // forward ops with saved bytes, most first
  std::vector<Event> timeline;
  std::vector<Span> spans;
  // On a CUDA device: a line for each shape for which a plain and a fused kernel were tried, and which of them is
  // taken.
  std::vector<std::string> ways;
  int64_t peak_event = -1;  // the event of `timeline` that reaches the peak; -1: nothing was allocated
};

struct StepOptions {
  std::string method = "forward";
  std::string device = "cpu";
  bool train = true;
  bool input_grad = false;  // floating-point inputs need a gradient too
  uint64_t seed = 0;
};

struct ProfileOptions : StepOptions {
  int warmup = 3, steps = 5;
  bool timing = true;                                // false: memory alone, one measured step after the warm-up
  bool modules = true;                               // false: the totals alone, which saves a step
  std::function<void(const std::string&)> progress;  // is told what runs now
};

// Runs training steps and records one of them, the one after the warm-up. Everything is put back as it was.
// Throws Error(ErrorKind::input) when forward or backward raise.
TSMEM_API Profile profile(torch::jit::Module& module, const std::vector<c10::IValue>& inputs,
                          const ProfileOptions& options);

// Seconds of one model's steps as a ratio to another's, over pairs of steps that ran in turns: the median, and the
// borders of the middle half.
struct TimeRatio {
  double median = 0, low = 0, high = 0;
  int pairs = 0;
};

// Times steps of two modules in turns, the first of a pair changing, so that whatever else the machine does meets both.
// Puts the medians into their profiles. The ratio is b's seconds to a's. Throws as profile() does.
TSMEM_API TimeRatio time_in_turns(torch::jit::Module& a, Profile& profile_a, torch::jit::Module& b, Profile& profile_b,
                                  const std::vector<c10::IValue>& inputs, const ProfileOptions& options);

}  // namespace tsmem
