// Compares two modules as their user would: numbers, state, memory, time.
#pragma once
#include <torch/csrc/jit/api/module.h>
#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <string>
#include <vector>

namespace tsmem {

struct VerifyOptions {
  std::string method = "forward";
  std::string device = "cpu";
  int calls = 4;
  bool train_mode = true, eval_mode = true;  // which modes to run
  uint64_t seed = 0;
  int seeds = 5;                                     // for the median of error ratios
  bool measure = true;                               // memory and time too
  std::function<void(const std::string&)> progress;  // is told what runs now
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

struct VerifyResult {
  bool equal = false;
  std::string verdict;                   // one sentence: why equal, or what differs
  std::vector<std::string> differences;  // all that was found, a sentence each; structure first
  std::vector<std::string> notes;        // what could not be checked, or was accepted and why
  std::vector<CallResult> calls;
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
std::vector<std::string> structure_differences(const torch::jit::Module& a, const torch::jit::Module& b);

// The part of it that state_dict holds: names, order, shapes, dtypes, values, sharing.
std::vector<std::string> state_differences(const torch::jit::Module& a, const torch::jit::Module& b);

// Runs both modules (copies of them: the arguments stay as they are) from the same seeds and inputs, in train mode, in
// eval mode and without grad. Each call has inputs of its own: those given, from the second on with a relative noise of
// 2^-10. Throws Error(kBadInput) where the inputs do not fit or A raises in every mode.
VerifyResult verify(const torch::jit::Module& a, const torch::jit::Module& b, const std::vector<c10::IValue>& inputs,
                    const VerifyOptions& options);

nlohmann::json to_json(const VerifyResult& r);

}  // namespace tsmem
