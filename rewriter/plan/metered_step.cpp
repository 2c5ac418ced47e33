#include "rewriter/plan/metered_step.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "rewriter/inputs.h"

namespace tsmem {
namespace {

// The peak of live bytes in every slot.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  // device: without an index all of its kind count.
  explicit Meter(c10::Device device) : device_(device) {}
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* ptr, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != device_.type() || (device_.has_index() && device != device_) || bytes == 0) return;
    std::lock_guard lock(mutex_);
    if (paused || done_) return;
    if (bytes > 0)
      live_[ptr] = bytes;
    else
      live_.erase(ptr);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  // A new slot begins.
  void mark(int at, bool backward) {
    std::lock_guard lock(mutex_);
    if (done_) return;
    end_slot();
    slots.push_back({at, backward, 0});
  }
  void finish() {
    std::lock_guard lock(mutex_);
    end_slot();
    done_ = true;
  }
  // Of live blocks, without those at `exclude`.
  int64_t live(const std::set<const void*>& exclude) {
    std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& [ptr, bytes] : live_) sum += exclude.count(ptr) ? 0 : bytes;
    return sum;
  }

  std::vector<StepModel::Slot> slots;
  int64_t highest = 0;
  bool paused = false;

 private:
  void end_slot() {
    if (!slots.empty()) slots.back().peak = peak_;
    highest = std::max(highest, peak_);
    peak_ = now_;
  }
  const c10::Device device_;
  std::mutex mutex_;
  bool done_ = false;
  int64_t now_ = 0, peak_ = 0;
  std::map<const void*, int64_t> live_;
};

class MeteredStep : public StepObserver {
 public:
  MeteredStep(c10::Device device, Journal& journal, const std::function<void()>& at_forward_end)
      : meter(std::make_shared<Meter>(device)), journal_(journal), at_forward_end_(at_forward_end) {
    journal_.mark = [m = meter](int at, bool backward) { m->mark(at, backward); };
  }
  ~MeteredStep() override { stop(); }
  void started() override {
    reports_.emplace(meter);
    meter->mark(0, false);
    noting_.emplace(journal_);
  }
  void forward_done(const c10::IValue& output) override {
    std::set<const void*> exclude;
    for (const auto& t : all_tensors(output))
      if (t.has_storage()) exclude.insert(t.storage().data());
    kept = meter->live(exclude);
    journal_.closed = true;
    meter->mark(static_cast<int>(journal_.values.size()), true);
    if (at_forward_end_) at_forward_end_();
  }
  void pause(bool on) override { meter->paused = on; }
  void backward_done() override {
    meter->finish();
    stop();
  }

  std::shared_ptr<Meter> meter;
  int64_t kept = 0;

 private:
  void stop() {
    noting_.reset();
    reports_.reset();
  }
  Journal& journal_;
  const std::function<void()>& at_forward_end_;
  std::optional<AllocatorReports> reports_;
  std::optional<JournalGuard> noting_;
};

}  // namespace

StepMemory metered(TrainingStep& step, c10::Device device, Journal& journal,
                   const std::function<void()>& at_forward_end) {
  MeteredStep observer(device, journal, at_forward_end);
  step.run(observer);
  return {observer.meter->slots, observer.meter->highest, observer.kept};
}

}  // namespace tsmem
