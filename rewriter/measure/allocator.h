// What the allocator gives out and takes back, from c10::MemoryReportingInfoBase: no hook, no change to the model.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace tsmem {

// Is told of every block of one device.
class AllocatorListener : public c10::MemoryReportingInfoBase {
 public:
  // device: without an index all of its kind count.
  explicit AllocatorListener(c10::Device device) : device_(device) {}
  bool memoryProfilingEnabled() const final { return true; }
  void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device device) final;
  // While it is paused, it is told of nothing.
  void pause(bool on) { paused_ = on; }
  bool paused() const { return paused_; }

 protected:
  // From any thread. bytes > 0: they were allocated; else freed.
  virtual void reported(const void* block, int64_t bytes) = 0;

 private:
  const c10::Device device_;
  std::atomic<bool> paused_ = false;
};

// While it lives, `to` gets the allocator's reports of this thread, and of backward's.
class AllocatorReports {
 public:
  explicit AllocatorReports(std::shared_ptr<c10::DebugInfoBase> to);
  ~AllocatorReports();
  AllocatorReports(const AllocatorReports&) = delete;
  AllocatorReports& operator=(const AllocatorReports&) = delete;

 private:
  const int log_level_;
  c10::DebugInfoGuard guard_;
};

}  // namespace tsmem
