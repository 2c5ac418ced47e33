#include "rewriter/measure/values.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "rewriter/error.h"

namespace tsmem {

using c10::IValue;

namespace {

void collect(const IValue& v, std::vector<IValue>& out) {
  if (v.isList()) {
    out.emplace_back(static_cast<int64_t>(v.toListRef().size()));
    for (auto& e : v.toListRef()) collect(e, out);
  } else if (v.isTuple()) {
    for (auto& e : v.toTupleRef().elements()) collect(e, out);
  } else if (v.isGenericDict()) {
    std::vector<std::pair<IValue, IValue>> entries;
    for (auto& e : v.toGenericDict()) entries.emplace_back(e.key(), e.value());
    std::stable_sort(entries.begin(), entries.end(), [](auto& a, auto& b) {
      if (a.first.isString() && b.first.isString()) return a.first.toStringRef() < b.first.toStringRef();
      if (a.first.isInt() && b.first.isInt()) return a.first.toInt() < b.first.toInt();
      return false;
    });
    out.emplace_back(static_cast<int64_t>(entries.size()));
    for (auto& e : entries) {
      if (!e.first.isTensor()) out.push_back(e.first);
      collect(e.second, out);
    }
  } else if (v.isObject()) {
    for (auto& e : v.toObjectRef().slots()) collect(e, out);
  } else {
    out.push_back(v);
  }
}

}  // namespace

std::vector<IValue> all_values(const IValue& value) {
  std::vector<IValue> out;
  collect(value, out);
  return out;
}

std::vector<at::Tensor> all_tensors(const IValue& value) {
  std::vector<at::Tensor> out;
  for (const IValue& v : all_values(value))
    if (v.isTensor() && v.toTensor().defined()) out.push_back(v.toTensor());
  return out;
}

std::vector<at::Tensor> floating_tensors(const IValue& value) {
  auto out = all_tensors(value);
  std::erase_if(out, [](const at::Tensor& t) { return !t.is_floating_point(); });
  return out;
}

std::vector<at::Tensor> cotangents(const std::vector<at::Tensor>& tensors, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> out;
  for (auto& t : tensors) {
    if (t.is_meta()) {
      out.push_back(at::empty_like(t));
      continue;
    }
    auto drawn = at::empty(t.sizes(), at::kFloat).normal_(0, 1, generator).to(at::kBFloat16);
    out.push_back(drawn.to(t.device(), t.scalar_type()));
  }
  return out;
}

at::Tensor loss_of(const IValue& output, uint64_t seed) {
  auto tensors = floating_tensors(output);
  if (tensors.empty())
    throw Error(ErrorKind::input,
                "The model returns no floating-point tensor, so there is nothing to run backward from.");
  auto random = cotangents(tensors, seed);
  at::Tensor loss;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto term = (tensors[i] * random[i]).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

IValue map_tensors(const IValue& v, const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isList()) {
    auto in = v.toListRef();
    c10::impl::GenericList out(v.type()->expectRef<c10::ListType>().getElementType());
    out.reserve(in.size());
    for (auto& e : in) out.push_back(map_tensors(e, f));
    return out;
  }
  if (v.isTuple()) {
    std::vector<IValue> out;
    for (auto& e : v.toTupleRef().elements()) out.push_back(map_tensors(e, f));
    auto type = v.type()->cast<c10::TupleType>();
    return type && type->schema() ? c10::ivalue::Tuple::createNamed(std::move(out), type)
                                  : c10::ivalue::Tuple::create(std::move(out));
  }
  if (v.isGenericDict()) {
    auto in = v.toGenericDict();
    c10::impl::GenericDict out(in.keyType(), in.valueType());
    for (auto& e : in) out.insert(map_tensors(e.key(), f), map_tensors(e.value(), f));
    return out;
  }
  return v;
}

IValue clone_value(const IValue& value, std::optional<at::ScalarType> dtype) {
  return map_tensors(value, [&](const at::Tensor& t) {
    auto copy = t.detach().clone();
    return dtype && copy.is_floating_point() ? copy.to(*dtype) : copy;
  });
}

}  // namespace tsmem
