// Constants and types as text that does not change from one load of a model to the next.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>

namespace tsmem {

// "__torch__.torch.nn.modules.conv.___torch_mangle_3.Conv2d" -> "torch.nn.modules.conv.Conv2d": the numbers are given
// anew at each load.
std::string unmangled(std::string name);

// "0.5", "2.0"
std::string real_text(double value);

// A tensor's values where they are few, else a checksum of its bytes.
std::string tensor_text(const at::Tensor& t);

std::string constant_text(const c10::IValue& value);

}  // namespace tsmem
