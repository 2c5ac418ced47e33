#include "rewriter/measure/allocator.h"

#include <c10/util/Logging.h>

#include <utility>

namespace tsmem {

void AllocatorListener::reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device device) {
  const bool ours = device.type() == device_.type() && (!device_.has_index() || device == device_);
  if (ours && bytes != 0 && !paused_) reported(block, bytes);
}

// LibTorch's reporter would log each block that was there before and is freed now.
AllocatorReports::AllocatorReports(std::shared_ptr<c10::DebugInfoBase> to)
    : log_level_(std::exchange(FLAGS_caffe2_log_level, c10::GLOG_ERROR)),
      guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(to)) {}

AllocatorReports::~AllocatorReports() { FLAGS_caffe2_log_level = log_level_; }

}  // namespace tsmem
