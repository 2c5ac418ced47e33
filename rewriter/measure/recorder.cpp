#include "rewriter/measure/recorder.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "rewriter/clock.h"
#include "rewriter/inputs.h"
#include "rewriter/measure/allocator.h"
#include "rewriter/measure/module_paths.h"
#include "rewriter/method_call.h"

namespace tsmem {
namespace {

using c10::IValue;
using Origin = Recording::Origin;

struct Frame {  // one at::RecordFunction that runs
  std::string name;
  int64_t sequence;
  at::RecordScope scope;
  size_t ordinal = 0;                   // of an op: how many of its name ran before
  std::optional<size_t> span{};         // that it is
  std::optional<ModulePlace> called{};  // of an op that calls a method: whose
  std::optional<Origin> checkpoint{};   // of tsmem::checkpoint: where it is
};
thread_local std::vector<Frame> frames;

class Recorder : public AllocatorListener {
 public:
  // device: without an index all of its kind count.
  Recorder(c10::Device device, const torch::jit::Module& root) : AllocatorListener(device), paths_(root) {}

  void start() { start_ = Clock::now(); }

  void reported(const void* block, int64_t bytes) override {
    // Asked for before the lock: it walks the interpreter's frames and must not allocate tensors, but may take long.
    Origin origin = bytes > 0 ? here() : Origin();
    std::lock_guard lock(mutex_);
    std::optional<size_t> index;
    if (bytes > 0) {
      live_[block] = *(index = seen.allocations.size());
      seen.allocations.push_back({bytes, origin, backward_});
      if (backward_) {
        seen.allocations.back().node = node_sequence();
        seen.allocations.back().inner = inner_op();
      }
    } else if (auto it = live_.find(block); it != live_.end()) {
      index = it->second;
      // What is still alive when the step has ended was kept by something else than backward (a cache, an attribute).
      if (seen.allocations[*index].alive_after_forward) {
        seen.freed.push_back(*index);
        seen.allocations[*index].kept_by = releasing_;
      }
      live_.erase(it);
    }
    if (!backward_done_) seen.events.push_back({{seconds_since(start_), bytes, backward_, "", ""}, index});
  }

  // Ends the forward phase; `exclude`: storages that are not saved for backward (outputs, attributes of the module).
  void forward_done(const std::unordered_set<const void*>& exclude) {
    std::lock_guard lock(mutex_);
    backward_ = true;
    for (auto& [ptr, i] : live_) seen.allocations[i].alive_after_forward = !exclude.contains(ptr);
  }

  void backward_done() {
    std::lock_guard lock(mutex_);
    backward_done_ = true;
  }

  // This autograd node lets go of what it keeps now.
  void releasing(int64_t sequence) {
    std::lock_guard lock(mutex_);
    releasing_ = sequence;
  }

  void enter(const at::RecordFunction& f) {
    bool nested = f.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION;
    frames.push_back({f.name(), f.seqNr(), f.scope()});
    if (f.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      std::lock_guard lock(mutex_);
      if (first(f.scope()) == &frames.back() && !seen.graphs.contains(f.seqNr()))
        begin_span({"", node_name(f.name()), {}}, f.seqNr());
      return;
    }
    if (nested) {
      std::lock_guard lock(mutex_);
      // The node of a differentiated graph was made just before its forward began.
      if (!backward_ && frames.back().name == "<forward op>")
        seen.graphs[static_cast<int64_t>(at::sequence_number::peek()) - 1];
      return;
    }
    {
      std::lock_guard lock(mutex_);
      if (backward_) {
        // A differentiated graph's node is as long as all that it runs: its ops are told apart.
        if (auto node = node_sequence(); first(f.scope()) == &frames.back() && seen.graphs.contains(node))
          begin_span({"", f.name(), {}}, node);
        return;
      }
      frames.back().ordinal = seen.op_modules[f.name()].size();
      seen.op_modules[f.name()].emplace_back(std::nullopt);
    }
    if (calls_method(frames.back()))
      // What it calls has a call stack of its own, which begins at that method.
      if (const auto caller = paths_.current(begun_at())) frames.back().called = paths_.called(*caller, f.name());
    auto origin = here();
    std::lock_guard lock(mutex_);
    if (first(f.scope()) == &frames.back()) begin_span(origin, -1);
    if (origin.ops.empty()) seen.op_modules[f.name()][frames.back().ordinal] = origin.module;
    if (!origin.ops.empty() && !seen.graphs.empty()) seen.graphs.rbegin()->second.push_back(origin);
    // An op that makes no autograd node leaves its number to the next one, so the last to show it is the node's op.
    // One whose tensors are in a tuple shows none.
    const auto node = calls_method(frames.back()) ? static_cast<int64_t>(at::sequence_number::peek()) : f.seqNr();
    if (node >= 0) seen.by_sequence[node] = origin;
    if (frames.back().name == "tsmem::checkpoint") {
      frames.back().sequence = node;
      frames.back().checkpoint = origin;
    }
  }

  void leave() {
    if (auto span = frames.back().span) {
      std::lock_guard lock(mutex_);
      seen.spans[*span].span.seconds = seconds_since(start_) - seen.spans[*span].span.t;
    }
    // Its autograd node is made last; those of the ops that it runs are gone by then.
    if (frames.back().checkpoint) {
      std::lock_guard lock(mutex_);
      const auto end = static_cast<int64_t>(at::sequence_number::peek());
      for (int64_t node = frames.back().sequence; node < end; ++node)
        seen.by_sequence[node] = *frames.back().checkpoint;
    }
    frames.pop_back();
  }

  Recording seen;

 private:
  static bool calls_method(const Frame& f) { return tsmem::calls_method(f.name); }

  // Where the interpreter's call stack begins, if not at the root.
  static const ModulePlace* begun_at() {
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
    auto place = frames.empty() || !frames.back().called ? paths_.current(begun_at(), origin.op) : frames.back().called;
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

  // The last frame is an op that counts for a module. With the lock held.
  void begin_span(const Origin& origin, int64_t node) {
    if (paused() || backward_done_) return;
    frames.back().span = seen.spans.size();
    seen.spans.push_back({{seconds_since(start_), 0, backward_, "", ""}, origin, node});
  }

  Clock::time_point start_;
  ModulePaths paths_;
  std::mutex mutex_;
  bool backward_ = false, backward_done_ = false;
  int64_t releasing_ = -1;
  std::unordered_map<const void*, size_t> live_;  // block -> its allocation
  std::string last_module_;
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

// The nodes of the graph behind an output, the last one first.
std::vector<torch::autograd::Node*> nodes_behind(const IValue& output) {
  std::vector<torch::autograd::Node*> nodes, todo;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto add = [&](torch::autograd::Node* n) {
    if (n && seen.insert(n).second) todo.push_back(n);
  };
  for (const auto& t : all_tensors(output)) add(t.grad_fn().get());
  while (!todo.empty()) {
    auto* n = todo.back();
    todo.pop_back();
    nodes.push_back(n);
    for (const auto& edge : n->next_edges()) add(edge.function.get());
  }
  std::stable_sort(nodes.begin(), nodes.end(), [](auto* a, auto* b) { return a->sequence_nr() > b->sequence_nr(); });
  return nodes;
}

// Lets a Recorder see one run of a TrainingStep.
class RecordedStep : public StepObserver {
 public:
  RecordedStep(std::shared_ptr<Recorder> recorder, const torch::jit::Module& module, bool releases = false)
      : recorder_(std::move(recorder)), module_(module), releases_(releases) {}
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
    if (!releases_) return;
    for (auto* node : nodes_behind(output)) {
      recorder_->releasing(static_cast<int64_t>(node->sequence_nr()));
      node->release_variables();
    }
    recorder_->releasing(-1);
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
  const bool releases_;  // what the graph keeps, once forward is done
  std::optional<AllocatorReports> reports_;
  std::optional<OpObserver> ops_;
};

}  // namespace

Recording record(TrainingStep& step, const torch::jit::Module& module, c10::Device device) {
  auto recorder = std::make_shared<Recorder>(device, module);
  RecordedStep recorded(recorder, module);
  const bool has_backward = step.run(recorded);
  recorded.stop();
  Recording seen = std::move(recorder->seen);
  seen.has_backward = has_backward;
  return seen;
}

Recording record_forward(TrainingStep& step, const torch::jit::Module& module, c10::Device device) {
  auto recorder = std::make_shared<Recorder>(device, module);
  RecordedStep recorded(recorder, module, /*releases=*/true);
  step.run_forward(recorded);
  recorded.stop();
  return std::move(recorder->seen);
}

}  // namespace tsmem
