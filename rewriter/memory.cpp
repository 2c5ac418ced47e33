#include "rewriter/memory.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/Logging.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ops/traits.h"
#include "rewriter/error.h"
#include "rewriter/inputs.h"

namespace tsmem {
namespace {

using c10::IValue;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Bytes of the distinct storages behind some tensors.
int64_t storage_bytes(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> seen;
  int64_t bytes = 0;
  for (auto& t : tensors)
    if (t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<int64_t>(t.storage().nbytes());
  return bytes;
}

void synchronize(c10::Device device) {
  if (!device.is_cuda()) return;
  const auto& hooks = at::detail::getCUDAHooks();
  hooks.deviceSynchronize(device.has_index() ? device.index() : hooks.getCurrentDevice());
}

// An op by its name and how often it had run before.
using Nth = std::pair<std::string, size_t>;

// Where an allocation comes from.
struct Origin {
  std::string module, op;
  std::vector<Nth> ops;  // where the module is a guess: the ops that run, outermost first
};

// The module of every op of a forward pass: op name -> module of each of its runs, where known.
using OpModules = std::map<std::string, std::vector<std::optional<std::string>>>;

// A module of the tree: its path, "" for the root, and itself.
struct Place {
  std::string path;
  c10::intrusive_ptr<c10::ivalue::Object> object;
};

// The module whose method runs, from the interpreter's call stack. Its entries name an instance by its last name alone
// ("0(Conv2d)::forward"), which a model with two module lists does not tell apart; so each call is looked up in the
// caller's graph by its place in the source, and the attributes that lead to the callee are read there.
class ModulePaths {
 public:
  explicit ModulePaths(const torch::jit::Module& root) : root_{"", root._ivalue()} {}

  // `from`: the module whose method began this call stack, where it is not the root. Nothing inside a graph that
  // TorchScript has differentiated, whose nodes have forgotten where they come from.
  std::optional<Place> current(const Place* from = nullptr) {
    auto names = torch::jit::currentModuleHierarchy();
    Place at = from ? *from : root_;
    if (names.empty()) return at;
    if (names[0].starts_with("TOP()::")) return {};
    auto calls = torch::jit::currentCallstack();
    std::reverse(calls.begin(), calls.end());  // innermost first, unlike the names
    std::lock_guard lock(mutex_);
    for (size_t i = 1; i < names.size() && i - 1 < calls.size(); ++i) {
      auto open = names[i].find('('), colons = names[i].rfind("::");
      if (open == std::string::npos || colons == std::string::npos) continue;  // a free function
      auto instance = names[i].substr(0, open), method = names[i].substr(colons + 2);
      if (instance != "SELF" && !follow(at, calls[i - 1], c10::prim::CallMethod, instance, method)) break;
    }
    return at;
  }

  // The module whose method the running operator (tsmem::checkpoint, tsmem::autocast), called by `caller`'s code,
  // calls.
  Place called(Place caller, const std::string& op) {
    auto calls = torch::jit::currentCallstack();
    std::lock_guard lock(mutex_);
    if (!calls.empty()) follow(caller, calls.front(), c10::Symbol::fromQualString(op), "", "");
    return caller;
  }

 private:
  using Key = std::tuple<const c10::ClassType*, std::string, size_t, size_t, std::string, std::string>;

  // From the module that makes a call to the one it calls. False where it can't be told.
  bool follow(Place& at, const torch::jit::StackEntry& call, c10::Symbol kind, const std::string& instance,
              const std::string& method) {
    for (auto& attribute : steps(at.object->type(), call, kind, instance, method)) {
      auto slot = at.object->type()->findAttributeSlot(attribute);
      if (!slot || !at.object->getSlot(*slot).isObject()) return false;
      at.object = at.object->getSlot(*slot).toObject();
      at.path += fmt::format("{}{}", at.path.empty() ? "" : ".", attribute);
    }
    return true;
  }

  const std::vector<std::string>& steps(const c10::ClassTypePtr& type, const torch::jit::StackEntry& call,
                                        c10::Symbol kind, const std::string& instance, const std::string& method) {
    auto [it, fresh] =
        cache_.try_emplace(Key{type.get(), call.filename, call.range.start(), call.range.end(), instance, method});
    if (!fresh) return it->second;
    auto* caller = type->findMethod(call.filename);
    if (auto* function = caller ? torch::jit::tryToGraphFunction(*caller) : nullptr)
      search(*function->graph()->block(), call, kind, instance, method, it->second);
    if (it->second.empty() && !instance.empty()) it->second = {instance};
    return it->second;
  }

  static void search(const torch::jit::Block& block, const torch::jit::StackEntry& call, c10::Symbol kind,
                     const std::string& instance, const std::string& method, std::vector<std::string>& out) {
    for (auto* n : block.nodes()) {
      for (auto* b : n->blocks()) search(*b, call, kind, instance, method, out);
      if (!out.empty()) return;
      if (n->kind() != kind || n->sourceRange().start() != call.range.start() ||
          n->sourceRange().end() != call.range.end())
        continue;
      if (kind == c10::prim::CallMethod && n->s(c10::attr::name) != method) continue;
      std::vector<std::string> chain;
      auto* from = n->input(0)->node();
      for (; from->kind() == c10::prim::GetAttr; from = from->input(0)->node())
        chain.insert(chain.begin(), from->s(c10::attr::name));
      if (from->kind() == c10::prim::Param && !chain.empty() && (instance.empty() || chain.back() == instance))
        out = chain;
    }
  }

  Place root_;
  std::mutex mutex_;
  std::map<Key, std::vector<std::string>> cache_;
};

struct Frame {  // one at::RecordFunction that runs
  std::string name;
  int64_t sequence;
  at::RecordScope scope;
  size_t ordinal = 0;                  // of an op: how many of its name ran before
  std::optional<size_t> span{};        // that it is
  std::optional<Place> called{};       // of an op that calls a method: whose
  std::optional<Origin> checkpoint{};  // of tsmem::checkpoint: where it is
};
thread_local std::vector<Frame> frames;

struct Allocation {
  int64_t bytes;
  Origin origin;
  bool backward;
  bool alive_after_forward = false;
  int64_t node = -1;    // in backward: the autograd node's sequence number
  std::string inner{};  // and the op that runs in it
};

class Recorder : public c10::MemoryReportingInfoBase {
 public:
  // device: without an index all of its kind count.
  Recorder(c10::Device device, const torch::jit::Module& root) : device_(device), paths_(root) {}

  void start() { start_ = Clock::now(); }

  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* ptr, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != device_.type() || (device_.has_index() && device != device_) || bytes == 0) return;
    // Asked for before the lock: it walks the interpreter's frames and must not allocate tensors, but may take long.
    Origin origin = bytes > 0 ? here() : Origin();
    std::lock_guard lock(mutex_);
    if (paused_) return;
    size_t index = kUnknown;
    if (bytes > 0) {
      live_[ptr] = index = allocations_.size();
      allocations_.push_back({bytes, origin, backward_});
      if (backward_) {
        allocations_.back().node = node_sequence();
        allocations_.back().inner = inner_op();
      }
    } else if (auto it = live_.find(ptr); it != live_.end()) {
      index = it->second;
      // What is still alive when the step has ended was kept by something else than backward (a cache, an attribute).
      if (allocations_[index].alive_after_forward) freed_.push_back(index);
      live_.erase(it);
    }
    if (backward_done_) return;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
    events_.push_back({{seconds_since(start_), bytes, backward_, "", ""}, index});
  }

  // Ends the forward phase; `exclude`: storages that are not kept for backward (outputs, attributes of the module).
  void forward_done(const std::unordered_set<const void*>& exclude) {
    std::lock_guard lock(mutex_);
    backward_ = true;
    for (auto& [ptr, i] : live_) allocations_[i].alive_after_forward = !exclude.contains(ptr);
  }

  void backward_done() {
    std::lock_guard lock(mutex_);
    backward_done_ = true;
  }

  void pause(bool on) {
    std::lock_guard lock(mutex_);
    paused_ = on;
  }

  void enter(const at::RecordFunction& f) {
    bool nested = f.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION;
    frames.push_back({f.name(), f.seqNr(), f.scope()});
    if (f.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      std::lock_guard lock(mutex_);
      if (first(f.scope()) == &frames.back() && !graphs_.contains(f.seqNr()))
        begin_span({"", node_name(f.name()), {}}, f.seqNr());
      return;
    }
    if (nested) {
      std::lock_guard lock(mutex_);
      // The node of a differentiated graph was made just before its forward began.
      if (!backward_ && frames.back().name == "<forward op>")
        graphs_[static_cast<int64_t>(at::sequence_number::peek()) - 1];
      return;
    }
    {
      std::lock_guard lock(mutex_);
      if (backward_) {
        // A differentiated graph's node is as long as all that it runs: its ops are told apart.
        if (auto node = node_sequence(); first(f.scope()) == &frames.back() && graphs_.contains(node))
          begin_span({"", f.name(), {}}, node);
        return;
      }
      frames.back().ordinal = op_modules_[f.name()].size();
      op_modules_[f.name()].emplace_back(std::nullopt);
    }
    if (calls_method(frames.back()))
      // What it calls has a call stack of its own, which begins at that method.
      if (const auto caller = paths_.current(begun_at())) frames.back().called = paths_.called(*caller, f.name());
    auto origin = here();
    std::lock_guard lock(mutex_);
    if (first(f.scope()) == &frames.back()) begin_span(origin, -1);
    if (origin.ops.empty()) op_modules_[f.name()][frames.back().ordinal] = origin.module;
    if (!origin.ops.empty() && !graphs_.empty()) graphs_.rbegin()->second.push_back(origin);
    // An op that makes no autograd node leaves its number to the next one, so the last to show it is the node's op.
    // One whose tensors are in a tuple shows none.
    const auto node = calls_method(frames.back()) ? static_cast<int64_t>(at::sequence_number::peek()) : f.seqNr();
    if (node >= 0) by_sequence_[node] = origin;
    if (frames.back().name == "tsmem::checkpoint") {
      frames.back().sequence = node;
      frames.back().checkpoint = origin;
    }
  }

  void leave() {
    if (auto span = frames.back().span) {
      std::lock_guard lock(mutex_);
      spans_[*span].span.seconds = seconds_since(start_) - spans_[*span].span.t;
    }
    // Its autograd node is made last; those of the ops that it runs are gone by then.
    if (frames.back().checkpoint) {
      std::lock_guard lock(mutex_);
      const auto end = static_cast<int64_t>(at::sequence_number::peek());
      for (int64_t node = frames.back().sequence; node < end; ++node) by_sequence_[node] = *frames.back().checkpoint;
    }
    frames.pop_back();
  }

  // Whether ops ran whose module is not known.
  bool guessed() const { return !graphs_.empty(); }

  const OpModules& op_modules() const { return op_modules_; }

  // Puts modules in the place of guesses, from a run of the same step without differentiated graphs, and then in
  // backward.
  void resolve(const OpModules& known) {
    auto settle = [&](Origin& origin) {
      for (auto& [name, n] : origin.ops) {
        auto it = known.find(name);
        // The n-th run of an op is the same one only where both runs have equally many.
        if (it == known.end() || it->second.size() != op_modules_[name].size()) continue;
        if (!it->second[n]) continue;
        origin.module = *it->second[n];
        break;
      }
      origin.ops.clear();
    };
    for (auto& a : allocations_)
      if (!a.backward) settle(a.origin);
    for (auto& [_, ops] : graphs_)
      for (auto& o : ops) settle(o);
    for (auto& [_, o] : by_sequence_) settle(o);
    for (auto& a : allocations_)
      if (a.backward) a.origin.module = backward_module(a.node, a.inner);
    for (auto& s : spans_) {
      if (s.span.backward)
        s.origin.module = backward_module(s.node, s.origin.op);
      else
        settle(s.origin);
      s.span.module = s.origin.module;
      s.span.op = s.origin.op;
    }
    for (auto& e : events_)
      if (e.index != kUnknown) {
        e.event.module = allocations_[e.index].origin.module;
        e.event.op = allocations_[e.index].origin.op;
      }
  }

  // Moves what was recorded into a profile.
  void report(Profile& p, const std::map<std::string, size_t>& index) {
    p.peak_bytes = peak_;
    auto row = [&](const std::string& path) -> ModuleMemory& {
      // A path that is no module's (an interface, a module out of a list held elsewhere) counts for the nearest one
      // above it.
      for (std::string at = path;; at = at.substr(0, at.rfind('.'))) {
        if (auto it = index.find(at); it != index.end()) return p.modules[it->second];
        if (at.find('.') == std::string::npos) return p.modules[index.at("")];
      }
    };
    for (auto& a : allocations_)
      (a.backward ? row(a.origin.module).backward_bytes : row(a.origin.module).forward_bytes) += a.bytes;
    std::map<std::string, OpMemory> ops;
    for (size_t i : freed_) {
      auto& a = allocations_[i];
      p.saved_bytes += a.bytes;
      row(a.origin.module).saved_bytes += a.bytes;
      auto& op = ops.try_emplace(a.origin.op, OpMemory{a.origin.op, 0, 0}).first->second;
      op.saved_bytes += a.bytes;
      ++op.count;
    }
    for (auto& [_, op] : ops) p.ops.push_back(op);
    std::stable_sort(p.ops.begin(), p.ops.end(), [](auto& a, auto& b) { return a.saved_bytes > b.saved_bytes; });
    for (auto& e : events_) p.timeline.push_back(std::move(e.event));
    for (auto& s : spans_) {
      (s.span.backward ? row(s.span.module).backward_seconds : row(s.span.module).forward_seconds) += s.span.seconds;
      p.spans.push_back(std::move(s.span));
    }
    int64_t now = 0;
    for (size_t i = 0; i < p.timeline.size(); ++i)
      if ((now += p.timeline[i].bytes) == peak_ && p.peak_event < 0) p.peak_event = static_cast<int64_t>(i);
  }

 private:
  static constexpr size_t kUnknown = static_cast<size_t>(-1);
  struct IndexedEvent {
    Event event;
    size_t index;  // of its allocation
  };

  struct PlacedSpan {
    Span span;
    Origin origin;
    int64_t node;  // in backward: as in Allocation
  };

  static bool calls_method(const Frame& f) { return traits_of(f.name).calls_method; }

  // Where the interpreter's call stack begins, if not at the root.
  static const Place* begun_at() {
    for (auto f = frames.rbegin(); f != frames.rend(); ++f)
      if (f->called) return &*f->called;
    return nullptr;
  }

  static const Frame* first(at::RecordScope scope) {
    for (auto& f : frames)
      if (f.scope == scope && !f.name.starts_with("autograd::engine::") && !calls_method(f)) return &f;
    return nullptr;
  }

  // "torch::autograd::CppNode<tsmem::(anonymous namespace)::Conv>" is the node of Conv.
  static std::string node_name(const std::string& name) {
    auto last = name.substr(name.rfind(':') + 1);
    return last.substr(0, last.find('>'));
  }

  static int64_t node_sequence() {
    auto* node = first(at::RecordScope::BACKWARD_FUNCTION);
    return node ? node->sequence : -1;
  }

  static std::string inner_op() {
    auto* op = first(at::RecordScope::FUNCTION);
    return op ? op->name : "";
  }

  Origin here() {
    auto* node = first(at::RecordScope::BACKWARD_FUNCTION);
    Origin origin;
    if (node) {
      origin.op = node_name(node->name);
      return origin;
    }
    origin.op = inner_op();
    auto place = frames.empty() || !frames.back().called ? paths_.current(begun_at()) : frames.back().called;
    std::lock_guard lock(mutex_);
    if (place) {
      origin.module = last_module_ = place->path;
    } else {
      origin.module = last_module_;
      for (auto& f : frames)
        if (f.scope == at::RecordScope::FUNCTION && !calls_method(f)) origin.ops.emplace_back(f.name, f.ordinal);
    }
    return origin;
  }

  // The module of the forward op that made the node.
  std::string backward_module(int64_t node, const std::string& inner) const {
    if (node < 0) return "";
    if (auto graph = graphs_.find(node); graph != graphs_.end() && !graph->second.empty()) {
      // "aten::_batch_norm_impl_index_backward" belongs to "aten::_batch_norm_impl_index".
      for (auto op = graph->second.rbegin(); op != graph->second.rend(); ++op)
        if (!op->op.empty() && inner.starts_with(op->op)) return op->module;
      return graph->second.back().module;
    }
    auto it = by_sequence_.upper_bound(node);
    return it == by_sequence_.begin() ? "" : std::prev(it)->second.module;
  }

  // The last frame is an op that counts for a module. With the lock held.
  void begin_span(const Origin& origin, int64_t node) {
    if (paused_ || backward_done_) return;
    frames.back().span = spans_.size();
    spans_.push_back({{seconds_since(start_), 0, backward_, "", ""}, origin, node});
  }

  const c10::Device device_;
  Clock::time_point start_;
  ModulePaths paths_;
  std::mutex mutex_;
  bool backward_ = false, backward_done_ = false, paused_ = false;
  int64_t now_ = 0, peak_ = 0;
  std::vector<Allocation> allocations_;
  std::unordered_map<void*, size_t> live_;  // pointer -> index in allocations_
  std::vector<size_t> freed_;               // alive after forward, and given back since
  std::map<int64_t, Origin> by_sequence_;   // autograd sequence number -> forward op
  std::map<int64_t, std::vector<Origin>>
      graphs_;  // sequence number of a differentiated graph's node -> its forward ops
  OpModules op_modules_;
  std::string last_module_;
  std::vector<IndexedEvent> events_;
  std::vector<PlacedSpan> spans_;
};

// Observes ops on this thread and on those that inherit its state, while it lives.
class OpObserver {
 public:
  OpObserver() {
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
                                             [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
                                               if (auto* r = recorder()) r->enter(f);
                                               return nullptr;
                                             },
                                             [](const at::RecordFunction&, at::ObserverContext*) {
                                               if (auto* r = recorder(); r && !frames.empty()) r->leave();
                                             })
                                             .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                                                      at::RecordScope::TORCHSCRIPT_FUNCTION}));
  }
  ~OpObserver() {
    at::removeCallback(handle_);
    frames.clear();
  }

 private:
  static Recorder* recorder() {
    return dynamic_cast<Recorder*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  }
  at::CallbackHandle handle_;
};

}  // namespace

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

// LibTorch's reporter would log each block that was there before and is freed now.
AllocatorReports::AllocatorReports(std::shared_ptr<c10::DebugInfoBase> to)
    : log_level_(std::exchange(FLAGS_caffe2_log_level, c10::GLOG_ERROR)),
      guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(to)) {}

AllocatorReports::~AllocatorReports() { FLAGS_caffe2_log_level = log_level_; }

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

struct TrainingStep::Impl {
  torch::jit::Module module;
  torch::jit::Method method;
  std::vector<IValue> inputs;
  ProfileOptions options;
  c10::Device device;
  StateGuard guard;
  std::vector<at::Tensor> parameters, random;
  bool drawn = false;

  Impl(torch::jit::Module& m, const std::vector<IValue>& in, const ProfileOptions& o)
      : module(m), method(m.get_method(o.method)), inputs(in), options(o), device(o.device), guard(m) {}
};

TrainingStep::TrainingStep(torch::jit::Module& module, const std::vector<IValue>& inputs,
                           const ProfileOptions& options) {
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

bool TrainingStep::run(StepObserver& observer) {
  auto& s = *impl_;
  // Forward may change its inputs in place, so each run gets its own.
  std::vector<IValue> inputs;
  for (auto& v : s.inputs) inputs.push_back(clone_value(v));
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
  auto named = [&](const char* phase, const std::exception& e) {
    return Error(kBadInput, fmt::format("The model's {} fails with these inputs: {}",
                                        phase == std::string("forward") ? s.options.method : phase, sentence(e)));
  };
  synchronize(s.device);
  observer.started();
  auto start = Clock::now();
  IValue output;
  try {
    output = s.method(inputs);
  } catch (const std::exception& e) {
    throw named("forward", e);
  }
  synchronize(s.device);
  forward_seconds = seconds_since(start);
  observer.forward_done(output);

  auto floating = floating_tensors(output);
  if (floating.empty())
    throw Error(
        kBadInput,
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
  start = Clock::now();
  try {
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
  } catch (const std::exception& e) {
    throw named("backward", e);
  }
  synchronize(s.device);
  backward_seconds = seconds_since(start);
  observer.backward_done();
  return !roots.empty();
}

namespace {

// Lets a Recorder see one run of a TrainingStep.
class RecordedStep : public StepObserver {
 public:
  RecordedStep(std::shared_ptr<Recorder> recorder, const torch::jit::Module& module)
      : recorder_(std::move(recorder)), module_(module) {}
  void started() override {
    reports_.emplace(recorder_);
    ops_.emplace();
    recorder_->start();
  }
  void forward_done(const IValue& output) override {
    std::unordered_set<const void*> exclude;
    auto add = [&](const IValue& v) {
      for (auto& t : all_tensors(v))
        if (t.has_storage()) exclude.insert(t.storage().data());
    };
    add(output);
    for (const auto& m : module_.modules())
      for (auto& v : m._ivalue()->slots())
        if (!v.isObject()) add(v);
    recorder_->forward_done(exclude);
  }
  void pause(bool on) override { recorder_->pause(on); }
  void backward_done() override { recorder_->backward_done(); }
  // Ends the recording; the destructor does, too.
  void stop() {
    ops_.reset();
    reports_.reset();
  }
  ~RecordedStep() override { stop(); }

 private:
  std::shared_ptr<Recorder> recorder_;
  const torch::jit::Module& module_;
  std::optional<AllocatorReports> reports_;
  std::optional<OpObserver> ops_;
};

}  // namespace

Profile profile(torch::jit::Module& module, const std::vector<IValue>& inputs, const ProfileOptions& options) {
  Profile p;
  auto say = [&](const std::string& text) {
    if (options.progress) options.progress(text);
  };
  std::map<std::string, size_t> index;
  for (const auto& m : module.named_modules()) {
    index[m.name] = p.modules.size();
    p.modules.push_back({m.name, m.value.type()->name()->name()});
  }
  p.input_bytes = storage_bytes(all_tensors(c10::ivalue::Tuple::create(inputs)));
  std::vector<at::Tensor> parameters;
  for (const auto& t : module.parameters()) parameters.push_back(t);
  p.parameter_bytes = storage_bytes(parameters);

  TrainingStep step(module, inputs, options);
  auto record = [&](TrainingStep& step, const torch::jit::Module& m) {
    auto recorder = std::make_shared<Recorder>(c10::Device(options.device), m);
    RecordedStep recorded(recorder, m);
    p.has_backward = step.run(recorded);
    recorded.stop();
    return recorder;
  };
  for (int i = 0; i < options.warmup; ++i) {
    say(fmt::format("warm-up step {} of {}", i + 1, options.warmup));
    step.run();
  }
  say("recording a step");
  auto recorder = record(step, module);
  if (options.modules && recorder->guessed()) {
    // In its first call each op knows its module. That of a copy: the measured module is called as its user would.
    say("finding the modules of differentiated graphs");
    std::stringstream bytes;
    module.save(bytes);
    auto copy = torch::jit::load(bytes, c10::Device(options.device));
    TrainingStep first(copy, inputs, options);
    recorder->resolve(record(first, copy)->op_modules());
  } else {
    recorder->resolve({});
  }
  recorder->report(p, index);
  if (options.timing) {
    std::vector<double> forward, backward, both;
    for (int i = 0; i < std::max(options.steps, 1); ++i) {
      say(fmt::format("timing step {} of {}", i + 1, options.steps));
      step.run();
      forward.push_back(step.forward_seconds);
      backward.push_back(step.backward_seconds);
      both.push_back(step.forward_seconds + step.backward_seconds);
    }
    p.forward_seconds = median(forward);
    p.backward_seconds = median(backward);
    p.step_seconds = median(both);
  }
  return p;
}

nlohmann::json to_json(const Profile& p) {
  auto modules = nlohmann::json::array(), ops = nlohmann::json::array(), timeline = nlohmann::json::array();
  for (auto& m : p.modules)
    modules.push_back({{"path", m.path},
                       {"type", m.type},
                       {"saved_bytes", m.saved_bytes},
                       {"forward_bytes", m.forward_bytes},
                       {"backward_bytes", m.backward_bytes},
                       {"forward_seconds", m.forward_seconds},
                       {"backward_seconds", m.backward_seconds}});
  for (auto& o : p.ops) ops.push_back({{"op", o.op}, {"saved_bytes", o.saved_bytes}, {"count", o.count}});
  for (auto& e : p.timeline)
    timeline.push_back({{"t", e.t},
                        {"phase", e.backward ? "backward" : "forward"},
                        {"module", e.module},
                        {"op", e.op},
                        {"bytes", e.bytes}});
  return {{"input_bytes", p.input_bytes},
          {"parameter_bytes", p.parameter_bytes},
          {"saved_bytes", p.saved_bytes},
          {"peak_bytes", p.peak_bytes},
          {"forward_seconds", p.forward_seconds},
          {"backward_seconds", p.backward_seconds},
          {"step_seconds", p.step_seconds},
          {"has_backward", p.has_backward},
          {"modules", modules},
          {"ops", ops},
          {"timeline", timeline}};
}

}  // namespace tsmem
