// Nested values, tensor by tensor; and what backward starts from.
#pragma once
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <vector>

namespace tsmem {

// Everything in nested lists, tuples, dicts and objects that holds nothing itself, in order (dicts by key): tensors,
// numbers, strings, None; and, before their elements, the sizes of lists and dicts, whose keys come too.
std::vector<c10::IValue> all_values(const c10::IValue& value);

// Every tensor in nested lists, tuples, dicts and objects; in order (dicts by key).
std::vector<at::Tensor> all_tensors(const c10::IValue& value);

// Those of floating point.
std::vector<at::Tensor> floating_tensors(const c10::IValue& value);

// A fixed random tensor for each tensor, of its shape, dtype and device: the gradients that backward starts from. Their
// values are exact in every floating-point dtype, so that a float64 run starts from the same numbers.
std::vector<at::Tensor> cotangents(const std::vector<at::Tensor>& tensors, uint64_t seed);

// What backward starts from: the sum of every floating-point output tensor times its cotangent.
// Throws Error(ErrorKind::input) where there is no floating-point output.
at::Tensor loss_of(const c10::IValue& output, uint64_t seed);

// The value with `f` applied to every tensor; lists, tuples and dicts are rebuilt, objects are shared.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);

// A deep copy with tensors cloned (dtype: floating-point ones cast where given).
c10::IValue clone_value(const c10::IValue& value, std::optional<at::ScalarType> dtype = {});

}  // namespace tsmem
