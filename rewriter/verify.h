// Compares two modules as their user would: numbers, state, memory, time.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

namespace tsmem {

struct VerifyOptions {
  std::string method = "forward";
  std::string device = "cpu";
  int calls = 4;
  bool train_mode = true, eval_mode = true;  // which modes to run
  uint64_t seed = 0;
  int seeds = 5;       // for the median of error ratios
  bool measure = true; // memory and time too
};

struct CallResult {
  std::string mode;  // "train", "eval", "no_grad"
  double output_error = 0, gradient_error = 0, buffer_error = 0;  // B against A in their own dtype, relative
  double f64_error = 0;                                           // B against A, both in float64
  double reference_output[2] = {0, 0}, reference_gradient[2] = {0, 0}, reference_buffer[2] = {0, 0};  // [A, B] against A in float64
};

struct VerifyResult {
  bool equal = false;
  std::string verdict;  // one sentence: why equal, or what differs
  std::vector<CallResult> calls;
  bool state_dict_equal = false;
  std::vector<std::string> gradients_only_in_a, gradients_only_in_b;
  int64_t saved_bytes[2] = {0, 0}, peak_bytes[2] = {0, 0};
  double step_seconds[2] = {0, 0};
};

// The contract of a rewritten model's state: same state_dict (names, order, shapes, dtypes, values, sharing), requires_grad and training flags,
// submodule tree, methods and signatures (`_tsmem_*` aside), constants. Empty where it holds, else a sentence for each difference.
std::vector<std::string> structure_differences(const torch::jit::Module& a, const torch::jit::Module& b);

VerifyResult verify(const torch::jit::Module& a, const torch::jit::Module& b, const std::vector<c10::IValue>& inputs, const VerifyOptions& options);

nlohmann::json to_json(const VerifyResult& r);

}  // namespace tsmem
