#include "rewriter/plan/metered_step.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "rewriter/measure/allocator.h"
#include "rewriter/measure/inputs.h"

namespace tsmem {
namespace {

// The peak of live bytes in every slot.
class Meter : public AllocatorListener {
 public:
  using AllocatorListener::AllocatorListener;
  // A new slot begins.
  void mark(int at, bool backward) {
    std::lock_guard lock(mutex_);
    end_slot();
    slots.push_back({at, backward, 0});
  }
  void finish() {
    std::lock_guard lock(mutex_);
    end_slot();
  }
  // Of live blocks, without those at `exclude`.
  int64_t live(const std::set<const void*>& exclude) {
    std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& [block, bytes] : live_) sum += exclude.count(block) ? 0 : bytes;
    return sum;
  }

  std::vector<StepModel::Slot> slots;
  int64_t highest = 0;

 private:
  void reported(const void* block, int64_t bytes) override {
    std::lock_guard lock(mutex_);
    if (bytes > 0)
      live_[block] = bytes;
    else
      live_.erase(block);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  void end_slot() {
    if (!slots.empty()) slots.back().peak = peak_;
    highest = std::max(highest, peak_);
    peak_ = now_;
  }
  std::mutex mutex_;
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
  void pause(bool on) override { meter->pause(on); }
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
