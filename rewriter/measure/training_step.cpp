#include "rewriter/measure/training_step.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>
#include <unordered_set>

#include "rewriter/clock.h"
#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/measure/state_guard.h"

namespace tsmem {

using c10::IValue;

static void synchronize(c10::Device device) {
  if (!device.is_cuda()) return;
  const auto& hooks = at::detail::getCUDAHooks();
  hooks.deviceSynchronize(device.has_index() ? device.index() : hooks.getCurrentDevice());
}

struct TrainingStep::Impl {
  torch::jit::Module module;
  torch::jit::Method method;
  std::vector<IValue> inputs;
  StepOptions options;
  c10::Device device;
  StateGuard guard;
  std::vector<at::Tensor> parameters, random;

  Impl(torch::jit::Module& m, const std::vector<IValue>& in, const StepOptions& o)
      : module(m), method(m.get_method(o.method)), inputs(in), options(o), device(o.device), guard(m) {}
};

TrainingStep::TrainingStep(torch::jit::Module& module, const std::vector<IValue>& inputs, const StepOptions& options) {
  if (options.device != "meta") require_device(options.device);
  impl_ = std::make_unique<Impl>(module, check_inputs(module, options.method, inputs), options);
  module.train(options.train);
  std::unordered_set<const void*> seen;
  for (const auto& p : module.parameters()) {
    if (!p.requires_grad() || !seen.insert(p.unsafeGetTensorImpl()).second) continue;
    impl_->parameters.push_back(p);
    impl_->parameters.back().mutable_grad() = at::zeros_like(p);
  }
}

TrainingStep::~TrainingStep() = default;

static Error failed(const std::string& what, const std::exception& e) {
  return Error(ErrorKind::input, fmt::format("The model's {} fails with these inputs: {}", what, sentence(e)));
}

IValue TrainingStep::forward(StepObserver& observer) {
  auto& s = *impl_;
  // Forward may change its inputs in place, so each run gets its own. Those that need a gradient (a graph's, from what
  // runs before it) do so here.
  std::vector<IValue> inputs;
  for (auto& v : s.inputs)
    inputs.push_back(
        map_tensors(v, [](const at::Tensor& t) { return t.detach().clone().requires_grad_(t.requires_grad()); }));
  for (auto& p : s.parameters) p.mutable_grad().zero_();
  if (s.options.input_grad)
    for (auto& t : floating_tensors(c10::ivalue::Tuple::create(inputs))) {
      t.requires_grad_();
      t.mutable_grad() = at::zeros_like(t);
    }
  {
    auto generator = at::globalContext().defaultGenerator(s.device.is_meta() ? c10::Device(c10::kCPU) : s.device);
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(s.options.seed);
  }
  synchronize(s.device);
  observer.started();
  const auto start = Clock::now();
  IValue output;
  try {
    output = s.method(inputs);
  } catch (const std::exception& e) {
    throw failed(s.options.method, e);
  }
  synchronize(s.device);
  forward_seconds = seconds_since(start);
  observer.forward_done(output);
  return output;
}

void TrainingStep::run_forward(StepObserver& observer) { forward(observer); }

bool TrainingStep::run(StepObserver& observer) {
  auto& s = *impl_;
  const IValue output = forward(observer);
  auto floating = floating_tensors(output);
  if (floating.empty())
    throw Error(
        ErrorKind::input,
        fmt::format("The model's {} returns no floating-point tensor, so there is nothing to run backward from.",
                    s.options.method));
  bool same = s.random.size() == floating.size();
  for (size_t i = 0; same && i < floating.size(); ++i)
    same = s.random[i].sizes() == floating[i].sizes() && s.random[i].scalar_type() == floating[i].scalar_type();
  if (!same) {
    observer.pause(true);
    s.random = cotangents(floating, s.options.seed);
    observer.pause(false);
  }
  std::vector<at::Tensor> roots, gradients;
  for (size_t i = 0; i < floating.size(); ++i)
    if (floating[i].requires_grad()) {
      roots.push_back(floating[i]);
      gradients.push_back(s.random[i]);
    }
  const auto start = Clock::now();
  try {
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
  } catch (const std::exception& e) {
    throw failed("backward", e);
  }
  synchronize(s.device);
  backward_seconds = seconds_since(start);
  observer.backward_done();
  return !roots.empty();
}

}  // namespace tsmem
