// Calls of a module's method from an operator, with arguments and results of any nesting.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace tsmem {

// The defined tensors in v, in tuples, lists and dicts, in order.
void collect(const at::IValue& v, std::vector<at::Tensor>& tensors);

// v with its tensors, in the order of collect(), replaced by those from `next` on, which is moved along.
at::IValue replace(const at::IValue& v, const at::Tensor*& next);

// self.method(*arguments); `arguments` is a tuple.
at::IValue call(const at::IValue& self, const std::string& method, const at::IValue& arguments);

}  // namespace tsmem
