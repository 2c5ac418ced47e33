#include "method_call.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <utility>

namespace tsmem {

using at::IValue;
using at::Tensor;

void collect(const IValue& v, std::vector<Tensor>& tensors) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) tensors.push_back(v.toTensor());
  } else if (v.isTuple()) {
    for (const IValue& e : v.toTupleRef().elements()) collect(e, tensors);
  } else if (v.isList()) {
    for (const IValue& e : v.toListRef()) collect(e, tensors);
  } else if (v.isGenericDict()) {
    for (const auto& entry : v.toGenericDict()) collect(entry.value(), tensors);
  }
}

// v with its tensors, in the order of collect(), replaced.
IValue replace(const IValue& v, const Tensor*& next) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(*next++) : v;
  if (v.isTuple()) {
    std::vector<IValue> elements;
    for (const IValue& e : v.toTupleRef().elements()) elements.push_back(replace(e, next));
    auto type = v.toTupleRef().type<c10::TupleType>();
    return type && type->schema() ? c10::ivalue::Tuple::createNamed(std::move(elements), type)
                                  : c10::ivalue::Tuple::create(std::move(elements));
  }
  if (v.isList()) {
    c10::impl::GenericList copy(v.toList().elementType());
    for (const IValue& e : v.toListRef()) copy.push_back(replace(e, next));
    return copy;
  }
  if (v.isGenericDict()) {
    auto dict = v.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) copy.insert(entry.key(), replace(entry.value(), next));
    return copy;
  }
  return v;
}

namespace {

// What runs in this thread by call(). TorchScript refuses methods that call themselves, but does not see through us.
thread_local std::vector<std::pair<const void*, const torch::jit::Function*>> running;

struct Running {
  Running(const void* self, const torch::jit::Function* function) {
    TORCH_CHECK(std::find(running.begin(), running.end(), std::make_pair(self, function)) == running.end(),
                "tsmem: the method ", function->qualname().qualifiedName(),
                " calls itself, by tsmem::checkpoint or tsmem::autocast, without an end");
    running.emplace_back(self, function);
  }
  ~Running() { running.pop_back(); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

}  // namespace

IValue call(const IValue& self, const std::string& method, const IValue& arguments) {
  const auto object = self.toObject();
  torch::jit::Stack stack{self};
  for (const IValue& a : arguments.toTupleRef().elements()) stack.push_back(a);
  auto* function = object->type()->findMethod(method);
  TORCH_CHECK(function, "tsmem: ", object->type()->repr_str(), " has no method ", method,
              "; torch.jit.freeze and optimize_for_inference take it away: use them on the original, restored");
  const Running now(object.get(), function);
  function->run(stack);
  return stack.back();
}

}  // namespace tsmem
