#include "rewriter/measure/state_guard.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>

#include <mutex>
#include <unordered_set>
#include <utility>

#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"

namespace tsmem {

using c10::IValue;

struct StateGuard::State {
  struct Slot {
    c10::intrusive_ptr<c10::ivalue::Object> object;
    size_t index;
    IValue value;
  };
  struct Content {
    at::Tensor tensor, copy;
  };
  struct Parameter {
    at::Tensor tensor, source;
    int64_t version;
  };
  struct Grad {
    at::Tensor tensor, grad, copy;
  };
  std::vector<Slot> slots;
  std::vector<Content> contents;
  std::vector<Parameter> parameters;
  std::vector<Grad> grads;
  std::vector<std::pair<at::Generator, at::Tensor>> generators;
};

StateGuard::StateGuard(const torch::jit::Module& module, const torch::jit::Module* source)
    : state_(std::make_unique<State>()) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen, sourced;
  if (source) {
    std::map<std::string, at::Tensor> there;
    for (const auto& p : source->named_parameters()) there.emplace(p.name, p.value);
    for (const auto& p : module.named_parameters())
      if (const auto from = there.find(p.name);
          from != there.end() && sourced.insert(p.value.unsafeGetTensorImpl()).second)
        state_->parameters.push_back({p.value, from->second, p.value._version()});
  }
  for (const auto& m : module.modules()) {
    auto object = m._ivalue();
    if (!seen.insert(object.get()).second) continue;
    for (size_t i = 0; i < object->slots().size(); ++i) {
      auto& v = object->slots()[i];
      // A list or dict that grows is put back as a container of the same tensors.
      state_->slots.push_back(
          {object, i, v.isList() || v.isGenericDict() ? map_tensors(v, [](auto& t) { return t; }) : v});
      if (v.isObject() || v.isCapsule()) continue;
      for (auto& t : all_tensors(v)) {
        if (!seen.insert(t.unsafeGetTensorImpl()).second) continue;
        // What overlaps itself refuses in-place changes, so it can't have changed.
        if (at::has_internal_overlap(t) != at::MemOverlap::Yes && !sourced.count(t.unsafeGetTensorImpl()))
          state_->contents.push_back({t, t.detach().clone()});
        if (t.is_leaf() && (t.requires_grad() || t.grad().defined()))
          state_->grads.push_back({t, t.grad(), t.grad().defined() ? t.grad().detach().clone() : at::Tensor()});
      }
    }
  }
  auto add = [&](at::Generator generator) {
    std::lock_guard lock(generator.mutex());
    state_->generators.emplace_back(generator, generator.get_state());
  };
  add(at::globalContext().defaultGenerator(c10::kCPU));
  if (at::hasCUDA())
    for (int i = 0; i < at::detail::getCUDAHooks().deviceCount(); ++i)
      add(at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i))));
}

StateGuard::~StateGuard() {
  at::NoGradGuard no_grad;
  try {
    for (auto& s : state_->slots) s.object->setSlot(s.index, s.value);
    // Through variable_data, which has a version counter of its own.
    for (auto& c : state_->contents) c.tensor.variable_data().copy_(c.copy);
    for (auto& p : state_->parameters)
      if (p.tensor._version() != p.version) p.tensor.variable_data().copy_(p.source.detach());
    for (auto& g : state_->grads) {
      if (g.grad.defined()) g.grad.variable_data().copy_(g.copy);
      g.tensor.mutable_grad() = g.grad;
    }
    for (auto& [generator, state] : state_->generators) {
      std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  } catch (const std::exception& e) {
    TORCH_WARN("The model's state could not be put back: ", sentence(e));
  }
}

}  // namespace tsmem
