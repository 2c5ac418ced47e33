// A whole method call that keeps its arguments alone, and runs again in backward.
//
// tsmem::checkpoint(self, method, arguments) is self.method(*arguments). Without gradients it is just that. With them,
// forward keeps the tensors among the arguments alone; backward runs the method again, with the generator's state and
// the autocast state of forward, and differentiates that. Buffers (running statistics, counters) change once, in
// forward: backward runs a copy of the module whose buffers are as forward found them. Parameters are inputs of the
// autograd node, so that their gradients flow and accumulate as usual.
//
// Forward runs in grad mode too and drops the graph that this makes: it tells which results need a gradient, and it is
// then the same code as backward's. The most memory that a step needs is not more by it, as backward needs as much.
//
// Results share memory as the method's do. The node gives out the tensors that own the memory; views of these, and
// arguments and views of them among the results, are made outside the node, where autograd sees what they are.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/api/module.h>

#include <unordered_set>

#include "common.h"
#include "function.h"
#include "known.h"
#include "method_call.h"
#include "registration.h"

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
  bool autocast_cache = true, eager_autocast = false;

  // Of the CPU and the devices where the tensors lie, and CUDA's autocast, as the method may go there by itself.
  static State now(const std::vector<Tensor>& tensors) {
    State s;
    s.add_generator(at::kCPU);
    for (const auto device : {at::kCPU, at::kCUDA}) s.add_autocast(device);
    std::vector<at::Device> seen{at::kCPU};
    for (const Tensor& t : tensors) {
      if (!t.defined() || t.is_meta() || std::find(seen.begin(), seen.end(), t.device()) != seen.end()) continue;
      seen.push_back(t.device());
      // Under the capture of a CUDA graph there is no state to go back to.
      if (!t.is_cuda() || graph_offset(t) < 0) s.add_generator(t.device());
      if (!t.is_cuda()) s.add_autocast(t.device().type());
    }
    s.autocast_cache = at::autocast::is_autocast_cache_enabled();
    s.eager_autocast = follows_eager_autocast();
    return s;
  }

  void add_generator(at::Device device) {
    at::Generator g;
    try {
      g = at::globalContext().defaultGenerator(device);
    } catch (const c10::Error&) {
      return;  // a device without one draws from the CPU's
    }
    std::lock_guard<std::mutex> lock(g.mutex());
    generators.emplace_back(device, g.get_state());
  }

  void add_autocast(at::DeviceType device) {
    if (at::autocast::is_autocast_available(device))
      autocast.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
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
    follow_eager_autocast(eager_autocast);
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

// Puts the state back, also when an exception passes.
struct Restore {
  const State before;
  explicit Restore(const std::vector<Tensor>& tensors) : before(State::now(tensors)) {}
  ~Restore() { before.set(); }
};

// A buffer as the call found it. The copy is undefined for a large one, which may not change until backward.
struct Buffer {
  Tensor itself, copy;
  uint32_t version;
};

constexpr int64_t kLargeBuffer = 1 << 20;  // bytes

// Tensors that are no parameters, of an object and those in it, also in lists, dicts and tuples.
void collect_buffers(const c10::ivalue::Object& object, std::unordered_set<const void*>& seen,
                     std::vector<Tensor>& buffers) {
  for (size_t i = 0; i < object.type()->numAttributes(); ++i) {
    const IValue& value = object.getSlot(i);
    if (value.isObject() && seen.insert(&value.toObjectRef()).second)
      collect_buffers(value.toObjectRef(), seen, buffers);
    if (object.type()->is_module() && object.type()->is_parameter(i)) continue;
    std::vector<Tensor> tensors;
    collect(value, tensors);
    for (const Tensor& t : tensors)
      if (seen.insert(t.unsafeGetTensorImpl()).second) buffers.push_back(t);
  }
}

std::vector<Tensor> buffers_of(const IValue& self) {
  std::vector<Tensor> buffers;
  std::unordered_set<const void*> seen;
  collect_buffers(*self.toObject(), seen, buffers);
  return buffers;
}

uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

std::vector<Buffer> buffers_now(const IValue& self) {
  std::vector<Buffer> buffers;
  for (const Tensor& b : buffers_of(self)) {
    const bool keep_copy = b.numel() * b.itemsize() <= kLargeBuffer && !b.requires_grad();
    buffers.push_back({b, keep_copy ? b.detach().clone() : Tensor(), version_of(b)});
  }
  return buffers;
}

using Replaced = std::unordered_map<const void*, IValue>;

// An object of other objects, lists, dicts and tuples, which shares the tensors of the first, but for what `replaced`
// gives for them.
IValue copy_object(const IValue& object, Replaced& replaced) {
  if (const auto made = replaced.find(&object.toObjectRef()); made != replaced.end()) return made->second;
  const auto copy = object.toObject()->copy();
  const IValue result(copy);
  replaced.emplace(&object.toObjectRef(), result);
  for (size_t i = 0; i < copy->type()->numAttributes(); ++i) {
    const IValue value = copy->getSlot(i);
    if (value.isObject()) {
      copy->setSlot(i, copy_object(value, replaced));
      continue;
    }
    std::vector<Tensor> tensors;
    collect(value, tensors);
    for (Tensor& t : tensors)
      if (const auto other = replaced.find(t.unsafeGetTensorImpl()); other != replaced.end())
        t = other->second.toTensor();
    const Tensor* next = tensors.data();
    copy->setSlot(i, replace(value, next));
  }
  return result;
}

// What a tensor among the results is: a buffer of the model, an input of the node (an argument or a parameter), an
// output of the node, or a view of one of these two.
struct Result {
  enum { buffer, input, output } of = output;
  size_t index = 0;    // of the input or the output
  Tensor itself = {};  // a buffer; else undefined
  bool view = false;
  bool requires_grad = false, passes_on = false;
  std::vector<int64_t> sizes = {}, strides = {};
  int64_t offset = 0;
};

// An output of the node: one of the results, or what one of them is a view of.
struct Output {
  size_t result;
  bool owner;
};

struct CheckpointCall : torch::CustomClassHolder {
  IValue self;       // a copy, as the call found it: flags, numbers and lists may change until backward
  IValue arguments;  // without their tensors
  std::string method;
  State state;
  std::vector<Buffer> buffers;
  size_t tensors = 0;               // among the arguments
  std::vector<bool> requires_grad;  // of these
  std::vector<Result> results;
  std::vector<Output> outputs;
};

// The module as the call found it, with other tensors in place of those that are `replaced`: what it overwrites is its
// own.
IValue module_then(const CheckpointCall& call, Replaced replaced) {
  for (const Buffer& b : call.buffers) {
    TORCH_CHECK(b.copy.defined() || version_of(b.itself) == b.version, "tsmem::checkpoint: a buffer of shape ",
                b.itself.sizes(), " of ", call.self.type()->repr_str(), " has changed since its method ", call.method,
                " ran, which can't be run again; rewrite the model without a checkpoint of this module");
    if (b.copy.defined()) replaced.emplace(b.itself.unsafeGetTensorImpl(), b.copy.clone());
  }
  return copy_object(call.self, replaced);
}

// Whether gradients of t reach what it was made from. A view made without grad mode says that it requires a gradient
// where its base does, and passes none on.
bool passes_on(const Tensor& t) { return t.requires_grad() && (t.grad_fn() || !t.is_view()); }

bool share_memory(const Tensor& a, const Tensor& b) { return a.has_storage() && b.has_storage() && a.is_alias_of(b); }

// `t`, a result, as a view of `base`.
void set_view(Result& r, const Tensor& t, const Tensor& base, const CheckpointCall& call) {
  r.view = !t.is_same(base);
  if (!r.view) return;
  TORCH_CHECK(t.scalar_type() == base.scalar_type() && t.is_conj() == base.is_conj() && t.is_neg() == base.is_neg(),
              "tsmem::checkpoint: the method ", call.method, " of ", call.self.type()->repr_str(),
              " returns a view of another dtype, which can't be recomputed; rewrite the model without a checkpoint of "
              "this module");
  r.sizes = t.sizes().vec();
  r.strides = t.strides().vec();
  r.offset = t.storage_offset();
}

// Sorts what the method returned into call.results and call.outputs; gives the tensors that are the node's outputs, and
// those of them that need no gradient.
std::pair<variable_list, variable_list> sort_results(CheckpointCall& call, const IValue& self,
                                                     const std::vector<Tensor>& returned, at::TensorList inputs) {
  const std::vector<Tensor> buffers = buffers_of(self);
  call.results.resize(returned.size());
  std::vector<std::pair<Tensor, std::vector<size_t>>> groups;  // what owns the memory, and the results that lie there
  for (size_t i = 0; i < returned.size(); ++i) {
    const Tensor& t = returned[i];
    Result& r = call.results[i];
    r.requires_grad = t.requires_grad();
    r.passes_on = passes_on(t);
    const auto same = [&](const Tensor& other) { return share_memory(t, other); };
    const auto in = std::find_if(inputs.begin(), inputs.end(), same);
    if (in != inputs.end()) {
      r.of = Result::input;
      r.index = in - inputs.begin();
      set_view(r, t, *in, call);
    } else if (std::any_of(buffers.begin(), buffers.end(), same)) {
      r.of = Result::buffer;
      r.itself = t;
    } else {
      const Tensor base = owner(t);
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first.is_same(base); });
      if (group == groups.end()) group = groups.insert(groups.end(), {base, {}});
      group->second.push_back(i);
    }
  }
  variable_list outputs, fixed;
  for (const auto& [base, members] : groups) {
    // A result that covers the memory, or is alone there, serves for the owner, which need not be the same tensor when
    // the method runs again (a linear layer's output may be a view, or none).
    // One that needs a gradient comes before its detached twin.
    auto whole = members.end();
    for (auto i = members.begin(); i != members.end(); ++i)
      if (returned[*i].numel() == base.numel() &&
          (whole == members.end() || (returned[*i].requires_grad() && !returned[*whole].requires_grad())))
        whole = i;
    const auto same_as_first = [&, &members = members](size_t i) { return returned[i].is_same(returned[members[0]]); };
    if (std::all_of(members.begin(), members.end(), same_as_first)) whole = members.begin();
    const bool as_owner = whole == members.end();
    const size_t chosen = as_owner ? members[0] : *whole;
    for (size_t i : members) {
      call.results[i].index = outputs.size();
      set_view(call.results[i], returned[i], as_owner ? base : returned[chosen], call);
    }
    call.outputs.push_back({chosen, as_owner});
    // Without the graph that made it, and no view, which autograd refuses to overwrite where a function returns one.
    const Tensor& made = as_owner ? base : returned[chosen];
    outputs.push_back(made.variable_data());
    if (!made.requires_grad()) fixed.push_back(outputs.back());
  }
  return {outputs, fixed};
}

Tensor make_result(const Result& r, at::TensorList inputs, const variable_list& outputs) {
  if (r.of == Result::buffer) return r.itself;
  const Tensor& base = r.of == Result::input ? inputs[r.index] : outputs[r.index];
  const at::AutoGradMode grad_mode(!r.view || r.passes_on);
  const Tensor result = r.view ? base.as_strided(r.sizes, r.strides, r.offset) : base;
  return result.requires_grad() && !r.requires_grad ? result.detach() : result;
}

// `arguments` with undefined tensors in place of its tensors: what is kept goes through save_for_backward.
IValue skeleton(const IValue& arguments, size_t count) {
  const std::vector<Tensor> none(count, at::empty({0}));
  const Tensor* next = none.data();
  return replace(arguments, next);
}

// Which of the inputs the results depend on.
std::vector<bool> needed(const std::vector<Tensor>& results, const std::vector<Tensor>& inputs) {
  using torch::autograd::Edge;
  std::vector<Edge> edges;
  for (const Tensor& t : inputs) edges.push_back(t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge());
  std::vector<bool> found(inputs.size());
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<Edge> open;
  for (const Tensor& t : results)
    if (passes_on(t)) open.push_back(torch::autograd::impl::gradient_edge(t));
  while (!open.empty()) {
    const Edge edge = open.back();
    open.pop_back();
    bool is_input = false;
    for (size_t i = 0; i < edges.size(); ++i)
      if (edges[i].is_valid() && edges[i] == edge) is_input = found[i] = true;
    if (is_input || !edge.is_valid() || !seen.insert(edge.function.get()).second) continue;
    for (const Edge& next : edge.function->next_edges()) open.push_back(next);
  }
  // A view made without grad mode says that it needs a gradient where its base does, and passes none on; what is made
  // from it says so too.
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].requires_grad() && !edges[i].is_valid()) found[i] = true;
  return found;
}

// Runs the method in grad mode; the tensors that it returns hold the graph that this makes.
IValue run_forward(const CheckpointCall& what, const IValue& self, const IValue& arguments,
                   const std::vector<Tensor>& inputs) {
  std::vector<uint32_t> versions;
  for (size_t i = 0; i < what.tensors; ++i) versions.push_back(version_of(inputs[i]));
  const auto graph_draws = [&] {
    std::vector<int64_t> offsets;
    for (const Tensor& t : inputs) offsets.push_back(graph_offset(t));
    return offsets;
  };
  const auto before = graph_draws();
  const NoAutocastCache fresh;
  const IValue result = call(self, what.method, arguments);
  TORCH_CHECK(graph_draws() == before, "tsmem::checkpoint: the method ", what.method, " of ",
              what.self.type()->repr_str(),
              " draws random numbers, which can't be drawn again inside a CUDA graph; rewrite the model without "
              "a checkpoint of this module");
  for (size_t i = 0; i < what.tensors; ++i)
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "tsmem::checkpoint: the method ", what.method, " of ",
                what.self.type()->repr_str(),
                " overwrites one of its arguments, so that it can't be run again; rewrite the model without "
                "a checkpoint of this module");
  return result;
}

// `inputs`: without a gradient where the results don't depend on them, so that what made them is left out of backward.
struct Checkpoint : Function<Checkpoint> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, c10::intrusive_ptr<CheckpointCall> what,
                               const std::pair<variable_list, variable_list>* results) {
    ctx->set_materialize_grads(false);
    const auto& [outputs, fixed] = *results;
    ctx->mark_non_differentiable(fixed);
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["call"] = IValue::make_capsule(what);
    return outputs;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const auto what = c10::static_intrusive_pointer_cast<CheckpointCall>(ctx->saved_data["call"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    variable_list result(saved.size() + 2);
    const bool create_graph = at::GradMode::is_enabled();
    variable_list inputs, wanted;
    Replaced parameters;
    std::vector<size_t> positions;
    for (size_t i = 0; i < saved.size(); ++i) {
      // Cut off from the tensor itself: its hooks, and what it was made from, wait for the gradients that this node
      // returns. Under create_graph it stays in the graph, so that second derivatives reach it.
      const bool argument = i < what->tensors;
      const bool grad = argument ? what->requires_grad[i] : saved[i].requires_grad();
      const bool in_graph = create_graph && grad == saved[i].requires_grad();
      if (in_graph)
        inputs.push_back(grad ? saved[i].view_as(saved[i]) : saved[i]);
      else
        inputs.push_back(saved[i].detach().set_requires_grad(grad));
      if (!argument && grad) parameters.emplace(saved[i].unsafeGetTensorImpl(), inputs.back());
      if (saved[i].requires_grad() && ctx->needs_input_grad(i)) {
        wanted.push_back(inputs.back());
        positions.push_back(i);
      }
    }
    variable_list outputs, cotangents;
    {
      const Restore restore(saved);
      what->state.set();
      const NoAutocastCache fresh;
      at::AutoGradMode grad_mode(true);
      const Tensor* next = inputs.data();
      variable_list all;
      collect(call(module_then(*what, parameters), what->method, replace(what->arguments, next)), all);
      TORCH_CHECK(all.size() == what->results.size(), "tsmem::checkpoint: the method ", what->method, " returned ",
                  all.size(), " tensors when it was run again, and ", what->results.size(), " before");
      for (size_t i = 0; i < grads.size(); ++i) {
        const auto [chosen, as_owner] = what->outputs[i];
        const Tensor again = as_owner ? owner(all[chosen]) : all[chosen];
        if (!grads[i].defined() || !passes_on(again)) continue;
        TORCH_CHECK(again.numel() == grads[i].numel(), "tsmem::checkpoint: the method ", what->method, " of ",
                    what->self.type()->repr_str(),
                    " returned views of another tensor when it was run again; rewrite the model without a checkpoint "
                    "of this module");
        outputs.push_back(again);
        cotangents.push_back(grads[i].reshape(again.sizes()));
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
  TORCH_CHECK(self.isModule(), "tsmem::checkpoint: self is not a module");
  std::vector<Tensor> inputs;
  collect(arguments, inputs);
  auto what = c10::make_intrusive<CheckpointCall>();
  what->tensors = inputs.size();
  bool grad = false;
  if (at::GradMode::is_enabled()) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const Tensor& p : torch::jit::Module(self.toObject()).parameters())
      if (p.defined() && seen.insert(p.unsafeGetTensorImpl()).second) inputs.push_back(p);
    for (const Tensor& t : inputs) grad |= t.requires_grad();
  }
  if (!grad) return call(self, method, arguments);
  Replaced nothing;
  what->self = copy_object(self, nothing);
  what->method = method;
  what->arguments = skeleton(arguments, what->tensors);
  what->state = State::now(inputs);
  what->buffers = buffers_now(self);
  for (size_t i = 0; i < what->tensors; ++i) what->requires_grad.push_back(inputs[i].requires_grad());
  const IValue result = run_forward(*what, self, arguments, inputs);
  std::vector<Tensor> returned, connected;
  collect(result, returned);
  const std::vector<bool> needs = needed(returned, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) connected.push_back(needs[i] ? inputs[i] : inputs[i].detach());
  const auto sorted = sort_results(*what, self, returned, inputs);
  const variable_list outputs = Checkpoint::apply(at::TensorList(connected), what, &sorted);
  std::vector<Tensor> results;
  for (const Result& r : what->results) results.push_back(make_result(r, inputs, outputs));
  for (Result& r : what->results) r.itself.reset();
  const Tensor* next = results.data();
  return replace(result, next);
}

}  // namespace

void register_checkpoint(torch::Library& m) {
  // Runs any code: TorchScript must neither merge nor drop nor move calls.
  m.def(torch::schema("checkpoint(Any self, str method, Any arguments) -> Any", c10::AliasAnalysisKind::CONSERVATIVE),
        [](const IValue& self, const std::string& method, const IValue& arguments) {
          return checkpoint(self, method, arguments);
        });
}

}  // namespace tsmem
