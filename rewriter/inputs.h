// Example inputs from the command line: --input SPEC and --inputs @FILE.pt.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

namespace tsmem {

// One argument a SPEC: "8x3x224x224", "4x128:i64[0,30522)", "8x3x224x224:bf16", "3:int", or "@file.pt" (torch.save: tensors in any
// nesting of lists, tuples, dicts and None). Random values are drawn with `seed`: normal for floating point, uniform in the range
// for integers. `inputs_file`, where not empty, is "@file.pt" with a tuple of all arguments and replaces `specs`.
// Throws Error(kUsage) for a SPEC that can't be read, Error(kBadInput) for a file.
std::vector<c10::IValue> make_inputs(const std::vector<std::string>& specs, const std::string& inputs_file, uint64_t seed,
                                     const std::string& device);

// Throws Error(kBadInput) with one sentence where the arguments do not fit the method's schema (too few, too many, wrong type).
void check_inputs(const torch::jit::Module& module, const std::string& method, const std::vector<c10::IValue>& inputs);

// Every floating-point tensor in nested lists, tuples, dicts; in order (dicts by key).
std::vector<at::Tensor> floating_tensors(const c10::IValue& value);

// What backward starts from: the sum of every floating-point output tensor times a fixed random tensor (drawn with `seed`).
// Throws Error(kBadInput) where there is no floating-point output.
at::Tensor loss_of(const c10::IValue& output, uint64_t seed);

// A deep copy with tensors cloned (dtype: floating-point ones cast where given).
c10::IValue clone_value(const c10::IValue& value, std::optional<at::ScalarType> dtype = {});

}  // namespace tsmem
