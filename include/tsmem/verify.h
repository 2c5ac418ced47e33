// Compares two modules as their user would: numbers, state, memory, time.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tsmem/api.h"
#include "tsmem/error.h"

namespace tsmem {

struct VerifyOptions {
  std::string method = "forward";
  std::string device = "cpu";
  int calls = 0;                             // in each mode; 0: four, or fewer where the time is short
  bool train_mode = true, eval_mode = true;  // which modes to run
  uint64_t seed = 0;
  int seeds = 0;        // for the median of error ratios; 0: five, or one for each call where the time is short
  bool measure = true;  // memory and time too
  std::optional<bool> thorough;  // everything on the inputs given, however long; unset: where there is time for it
  double seconds = 20;  // else the time for it all, or that of ten training steps of the first model if that is longer
  double spent = 0;     // of that time, what has gone by before
  std::function<void(const std::string&, double)> progress;  // is told what runs now, and the part that is done
};

// Errors are relative norms; of a group of tensors the worst counts, one whose true value is about zero (a conv bias
// before a batch norm) measured against the group's typical size. Infinity: shapes differ, or one is NaN where the
// other is not; NaN: not measured.
struct CallResult {
  std::string mode;                                               // "train", "eval", "no_grad" (in eval mode)
  double output_error = 0, gradient_error = 0, buffer_error = 0;  // B against A in their own dtype
  double f64_error = 0;  // B against A, both in float64; the worst of the three
  double reference_output[2] = {0, 0}, reference_gradient[2] = {0, 0},
         reference_buffer[2] = {0, 0};  // [A, B] against A in float64
};

// What was compared in one mode, with inputs of one size.
struct Compared {
  std::string mode;
  bool given = true;                // the inputs as they were given, not smaller ones
  std::vector<std::string> inputs;  // a tensor each: "3x3x64x64 float32"
  int calls = 0;
  std::vector<std::string> dtypes;                                // the models' own, "float64"
  double output_error = 0, gradient_error = 0, buffer_error = 0;  // B against A in their own dtype, the worst call
};

struct VerifyResult {
  bool equal = false;
  std::string verdict;                   // one sentence: why equal, or what differs
  std::vector<std::string> differences;  // all that was found, a sentence each; structure first
  std::vector<std::string> notes;        // what could not be checked, or was accepted and why
  std::vector<CallResult> calls;         // of those that were compared in float64 too (where A runs in it)
  std::vector<Compared> compared;
  bool thorough = false;  // the whole check, asked for or because there was time for it
  double seconds = 0;     // that it took
  double first_step_seconds =
      0;  // of A's training step with the inputs given, roughly: what the time allowed came from
  bool state_dict_equal = false;
  std::vector<std::string> gradients_only_in_a, gradients_only_in_b;
  double ratio_output = 1, ratio_gradient = 1, ratio_buffer = 1;  // medians of B's error over A's, the worse mode
  bool measured = false;                                          // the figures below are there
  int64_t saved_bytes[2] = {0, 0}, peak_bytes[2] = {0, 0};
  double step_seconds[2] = {0, 0};
};

// The contract of a rewritten model's state: same state_dict (names, order, shapes, dtypes, values, sharing),
// requires_grad and training flags, submodule tree, methods and signatures (`_tsmem_*` aside), constants. Empty where
// it holds, else a sentence for each difference.
// `state_equal`, if any, is told whether state_differences() is empty.
TSMEM_API std::vector<std::string> structure_differences(const torch::jit::Module& a, const torch::jit::Module& b,
                                                         bool* state_equal = nullptr);

// The part of it that state_dict holds: names, order, shapes, dtypes, values, sharing.
TSMEM_API std::vector<std::string> state_differences(const torch::jit::Module& a, const torch::jit::Module& b);

// Runs both modules (copies of them: the arguments stay as they are) from the same seeds and inputs, in train mode, in
// eval mode and without grad. Each call has inputs of its own: those given, from the second on with a relative noise of
// 2^-10. Where the whole check would take too long, calls are compared on smaller inputs that A takes (three rows,
// pictures of about 64 pixels) and which reach every parameter, and besides in the models' own dtype on those given.
// Throws Error(ErrorKind::input) where the inputs do not fit or A raises in every mode; where B raises that is a
// difference.
TSMEM_API VerifyResult verify(const torch::jit::Module& a, const torch::jit::Module& b,
                              const std::vector<c10::IValue>& inputs, const VerifyOptions& options);

// What was compared, in a sentence or two.
TSMEM_API std::string compared_text(const VerifyResult& r);

}  // namespace tsmem
