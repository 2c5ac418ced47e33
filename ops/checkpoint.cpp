// A whole method call that keeps its arguments alone, and runs again in backward.
//
// tsmem::checkpoint(self, method, arguments) is self.method(*arguments). Without gradients it is just that. With them,
// forward runs without grad mode and keeps the tensors among the arguments; backward runs the method again, with the
// generator's state and the autocast state of forward, and differentiates that. Buffers (running statistics, counters)
// change once, in forward: backward puts them back. Parameters are inputs of the autograd node, so that their gradients
// flow and accumulate as usual.
//
// Results share memory as the method's do. The node gives out the tensors that own the memory; views of these, and
// arguments and views of them among the results, are made outside the node, where autograd sees what they are.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/library.h>

#include <unordered_set>

#include "common.h"
#include "method_call.h"

namespace tsmem {
namespace {

using at::IValue;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Thread-local state that decides what a method computes.
struct State {
  std::vector<std::pair<at::Device, Tensor>> generators;
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<Autocast> autocast;
  bool autocast_cache = true;

  // CUDA's generators as far as the tensors lie there, other than under the capture of a graph, where there is no state
  // to go back to.
  static State now(const std::vector<Tensor>& tensors) {
    State s;
    std::vector<at::Device> devices{at::kCPU};
    for (const Tensor& t : tensors)
      if (t.is_cuda() && std::find(devices.begin(), devices.end(), t.device()) == devices.end() && graph_offset(t) < 0)
        devices.push_back(t.device());
    for (const at::Device& d : devices) {
      at::Generator g = at::globalContext().defaultGenerator(d);
      std::lock_guard<std::mutex> lock(g.mutex());
      s.generators.emplace_back(d, g.get_state());
    }
    for (auto device : {at::kCPU, at::kCUDA})
      s.autocast.push_back(
          {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    s.autocast_cache = at::autocast::is_autocast_cache_enabled();
    return s;
  }

  void set() const {
    for (const auto& [device, generator] : generators) {
      at::Generator g = at::globalContext().defaultGenerator(device);
      std::lock_guard<std::mutex> lock(g.mutex());
      g.set_state(generator);
    }
    for (const Autocast& a : autocast) {
      at::autocast::set_autocast_enabled(a.device, a.enabled);
      at::autocast::set_autocast_dtype(a.device, a.dtype);
    }
    at::autocast::set_autocast_cache_enabled(autocast_cache);
  }
};

// While this lives autocast casts anew each time. Its cache is emptied when the outermost autocast ends: what was cast
// without grad mode would be found by those who need a gradient, and what backward casts by the next step, after the
// weight has changed.
struct NoAutocastCache {
  const bool before = at::autocast::is_autocast_cache_enabled();
  NoAutocastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before); }
};

// Puts state and buffers back, also when an exception passes.
struct Restore {
  State before;
  std::vector<std::pair<Tensor, Tensor>> buffers;  // a buffer and its copy
  Restore(const std::vector<Tensor>& tensors, const std::vector<Tensor>& all_buffers) : before(State::now(tensors)) {
    at::NoGradGuard no_grad;
    for (const Tensor& b : all_buffers) buffers.emplace_back(b, b.detach().clone());
  }
  ~Restore() {
    before.set();
    at::NoGradGuard no_grad;
    // Below the counter of versions: for everybody else nothing has changed.
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [buffer, copy] : buffers) buffer.copy_(copy);
  }
};

// What a tensor among the results is: a buffer of the model, an input of the node (an argument or a parameter), an
// output of the node, or a view of one of these two.
struct Result {
  enum { buffer, input, output } of = output;
  size_t index = 0;    // of the input or the output
  Tensor itself = {};  // a buffer; else undefined
  bool view = false;
  std::vector<int64_t> sizes = {}, strides = {};
  int64_t offset = 0;
};

struct Call : torch::CustomClassHolder {
  IValue self, arguments;  // arguments: without their tensors
  std::string method;
  State state;
  size_t tensors = 0;
  std::vector<Result> results;
};

std::vector<Tensor> buffers_of(const IValue& self) {
  std::vector<Tensor> buffers;
  for (const Tensor& b : torch::jit::Module(self.toObject()).buffers())
    if (b.defined()) buffers.push_back(b);
  return buffers;
}

// The tensor that owns t's memory: what it is a view of, or itself.
Tensor owner(const Tensor& t) { return t.is_view() ? Tensor(static_cast<const at::TensorBase&>(t._base())) : t; }

// Sorts what the method returned; `outputs` gets the tensors that the node gives out.
std::vector<Result> sort_results(const Call& call, const std::vector<Tensor>& returned, at::TensorList inputs,
                                 variable_list& outputs) {
  const std::vector<Tensor> buffers = buffers_of(call.self);
  const auto view_of = [&](Result result, const Tensor& t, const Tensor& base) {
    result.view = !t.is_same(base);
    if (!result.view) return result;
    TORCH_CHECK(t.scalar_type() == base.scalar_type() && t.is_conj() == base.is_conj() && t.is_neg() == base.is_neg(),
                "tsmem::checkpoint: the method ", call.method, " of ", call.self.type()->repr_str(),
                " returns a view of another dtype, which can't be made again; rewrite the model without --checkpoint "
                "for this module");
    result.sizes = t.sizes().vec();
    result.strides = t.strides().vec();
    result.offset = t.storage_offset();
    return result;
  };
  const auto share = [](const Tensor& a, const Tensor& b) {
    return a.has_storage() && b.has_storage() && a.is_alias_of(b);
  };
  std::vector<Result> results;
  for (const Tensor& t : returned) {
    const auto same = [&](const Tensor& other) { return share(t, other); };
    const auto in = std::find_if(inputs.begin(), inputs.end(), same);
    if (in != inputs.end()) {
      results.push_back(view_of({.of = Result::input, .index = static_cast<size_t>(in - inputs.begin())}, t, *in));
      continue;
    }
    if (std::any_of(buffers.begin(), buffers.end(), same)) {
      results.push_back({.of = Result::buffer, .itself = t});
      continue;
    }
    const Tensor base = owner(t);
    auto out = std::find_if(outputs.begin(), outputs.end(), [&](const Tensor& o) { return o.is_same(base); });
    if (out == outputs.end()) out = outputs.insert(outputs.end(), base);
    results.push_back(view_of({.of = Result::output, .index = static_cast<size_t>(out - outputs.begin())}, t, base));
  }
  return results;
}

Tensor make_result(const Result& r, at::TensorList inputs, const variable_list& outputs) {
  if (r.of == Result::buffer) return r.itself;
  const Tensor& base = r.of == Result::input ? inputs[r.index] : outputs[r.index];
  return r.view ? base.as_strided(r.sizes, r.strides, r.offset) : base;
}

// `arguments` with undefined tensors in place of its tensors: what is kept goes through save_for_backward.
IValue skeleton(const IValue& arguments, size_t count) {
  const std::vector<Tensor> none(count, at::empty({0}));
  const Tensor* next = none.data();
  return replace(arguments, next);
}

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, c10::intrusive_ptr<Call> what,
                               const IValue& arguments, IValue* result) {
    ctx->set_materialize_grads(false);
    std::vector<uint32_t> versions;
    for (size_t i = 0; i < what->tensors; ++i) versions.push_back(inputs[i].is_inference() ? 0 : inputs[i]._version());
    const auto graph_draws = [&] {
      std::vector<int64_t> offsets;
      for (const Tensor& t : inputs) offsets.push_back(graph_offset(t));
      return offsets;
    };
    const auto before = graph_draws();
    {
      const NoAutocastCache fresh;
      *result = call(what->self, what->method, arguments);
    }
    TORCH_CHECK(graph_draws() == before, "tsmem::checkpoint: the method ", what->method, " of ",
                what->self.type()->repr_str(),
                " draws random numbers, which can't be drawn again inside a CUDA graph; rewrite the model without "
                "--checkpoint for this module");
    for (size_t i = 0; i < what->tensors; ++i)
      TORCH_CHECK(inputs[i].is_inference() || inputs[i]._version() == versions[i], "tsmem::checkpoint: the method ",
                  what->method, " of ", what->self.type()->repr_str(),
                  " overwrites one of its arguments, so that it can't be run again; rewrite the model without "
                  "--checkpoint for this module");
    std::vector<Tensor> returned;
    collect(*result, returned);
    variable_list outputs, fixed;
    what->results = sort_results(*what, returned, inputs, outputs);
    for (const Tensor& t : outputs)
      if (!t.is_floating_point() && !t.is_complex()) fixed.push_back(t);
    ctx->mark_non_differentiable(fixed);
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["call"] = IValue::make_capsule(what);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto what = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    variable_list result(saved.size() + 3);
    const bool create_graph = at::GradMode::is_enabled();
    variable_list inputs, wanted;
    std::vector<size_t> positions;
    for (size_t i = 0; i < saved.size(); ++i) {
      // Under create_graph the arguments stay in the graph, so that second derivatives reach them.
      const bool own = i < what->tensors && !create_graph;
      inputs.push_back(own ? saved[i].detach().set_requires_grad(saved[i].requires_grad()) : saved[i]);
      if (saved[i].requires_grad() && ctx->needs_input_grad(i)) {
        wanted.push_back(inputs.back());
        positions.push_back(i);
      }
    }
    variable_list outputs, cotangents;
    {
      const Restore restore(saved, buffers_of(what->self));
      what->state.set();
      const NoAutocastCache fresh;
      at::AutoGradMode grad_mode(true);
      const Tensor* next = inputs.data();
      variable_list all;
      collect(call(what->self, what->method, replace(what->arguments, next)), all);
      TORCH_CHECK(all.size() == what->results.size(), "tsmem::checkpoint: the method ", what->method, " returned ",
                  all.size(), " tensors when it was run again, and ", what->results.size(), " before");
      std::vector<bool> done(grads.size());
      for (size_t i = 0; i < all.size(); ++i) {
        const Result& r = what->results[i];
        if (r.of != Result::output || done[r.index] || !grads[r.index].defined()) continue;
        done[r.index] = true;
        const Tensor again = r.view ? owner(all[i]) : all[i];
        TORCH_CHECK(again.sizes() == grads[r.index].sizes(), "tsmem::checkpoint: the method ", what->method,
                    " returned another view when it was run again");
        if (!again.requires_grad()) continue;
        outputs.push_back(again);
        cotangents.push_back(grads[r.index]);
      }
    }
    if (outputs.empty() || wanted.empty()) return result;
    const auto found = torch::autograd::grad(outputs, wanted, cotangents, /*retain_graph=*/create_graph, create_graph,
                                             /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) result[positions[i]] = found[i];
    return result;
  }
};

IValue checkpoint(const IValue& self, const std::string& method, const IValue& arguments) {
  TORCH_CHECK(self.isModule(), "tsmem::checkpoint: self is no module");
  std::vector<Tensor> inputs;
  collect(arguments, inputs);
  auto what = c10::make_intrusive<Call>();
  what->tensors = inputs.size();
  bool grad = false;
  if (at::GradMode::is_enabled()) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const Tensor& p : torch::jit::Module(self.toObject()).parameters())
      if (p.defined() && seen.insert(p.unsafeGetTensorImpl()).second) inputs.push_back(p);
    for (const Tensor& t : inputs) grad |= t.requires_grad();
  }
  if (!grad) return call(self, method, arguments);
  what->self = self;
  what->method = method;
  what->arguments = skeleton(arguments, what->tensors);
  what->state = State::now(inputs);
  IValue result;
  const variable_list outputs = Checkpoint::apply(at::TensorList(inputs), what, arguments, &result);
  std::vector<Tensor> results;
  for (const Result& r : what->results) results.push_back(make_result(r, inputs, outputs));
  for (Result& r : what->results) r.itself.reset();
  const Tensor* next = results.data();
  return replace(result, next);
}

TORCH_LIBRARY_FRAGMENT(tsmem, m) {
  if (another_copy_registered()) return;
  // Runs any code: TorchScript must neither merge nor drop nor move calls.
  m.def(torch::schema("checkpoint(Any self, str method, Any arguments) -> Any", c10::AliasAnalysisKind::CONSERVATIVE),
        [](const IValue& self, const std::string& method, const IValue& arguments) {
          return checkpoint(self, method, arguments);
        });
}

}  // namespace
}  // namespace tsmem
