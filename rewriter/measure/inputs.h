// Example inputs, as SPECs and files.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

#include "rewriter/measure/values.h"

namespace tsmem {

// One argument a SPEC: "8x3x224x224", "4x128:i64[0,30522)", "8x3x224x224:bf16", "():f32" (no dimensions), "3:int",
// "0.5:float", "true:bool", or "@file.pt" (torch.save: tensors, numbers, strings and None in any nesting of lists,
// tuples and dicts). Dtypes: f32 (default), f64, bf16, f16, i64, i32, i16, i8, u8, bool. Random values are drawn with
// `seed`: normal for floating point, or uniform in the range where one is given; uniform in the range for integers,
// [0,256) for u8 and [0,2) for the others by default. `inputs_file`, where not empty, is "@file.pt" with a tuple or
// list of all arguments and replaces `specs`. Throws Error(ErrorKind::request) for a SPEC that can't be read,
// Error(ErrorKind::input) for a file.
std::vector<c10::IValue> make_inputs(const std::vector<std::string>& specs, const std::string& inputs_file,
                                     uint64_t seed, const std::string& device);

// The arguments as the method's schema types them: lists and dicts get their element types, a tuple becomes a list
// where a list is wanted, an int a float. Trailing arguments with defaults may be left out. Throws
// Error(ErrorKind::input) with one sentence where they do not fit (too few, too many, wrong type),
// Error(ErrorKind::request) where there is no such method.
std::vector<c10::IValue> check_inputs(const torch::jit::Module& module, const std::string& method,
                                      const std::vector<c10::IValue>& inputs);

// Throws Error(ErrorKind::request) with one sentence where LibTorch can't use the device ("cpu", "cuda", "cuda:1").
// Loads LibTorch's CUDA part.
void require_device(const std::string& device);

}  // namespace tsmem
