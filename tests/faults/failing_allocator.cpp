// A CPU allocator that counts requests and live bytes, and fails where it is told to: for
// tests/ops/test_out_of_memory.py.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

std::atomic<int64_t> requests{0}, live{0}, first{0}, last{0}, refused{0};
std::mutex mutex;
std::unordered_map<void*, size_t> sizes;

void release(void* p) {
  if (!p) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = sizes.find(p);
    live -= static_cast<int64_t>(it->second);
    sizes.erase(it);
  }
  c10::free_cpu(p);
}

struct Failing : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int64_t n = ++requests;
    if (n >= first && n <= last) {
      ++refused;
      // As TORCH_CHECK does, without a backtrace: thousands of them take minutes.
      throw c10::Error("failing allocator: request " + std::to_string(n), nullptr);
    }
    void* p = c10::alloc_cpu(bytes);
    if (p) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes.emplace(p, bytes);
      live += static_cast<int64_t>(bytes);
    }
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

#define TSMEM_EXPORT extern "C" __attribute__((visibility("default")))

// What was allocated before, or between the two, keeps its own deleter.
TSMEM_EXPORT void faults_install() {
  static Failing allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/255);
}
TSMEM_EXPORT void faults_uninstall() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/255); }
// Counts requests from 1 again, and refuses those from `from` to `to`; 0, 0: none.
TSMEM_EXPORT void faults_refuse(int64_t from, int64_t to) { requests = 0, refused = 0, first = from, last = to; }
TSMEM_EXPORT int64_t faults_requests() { return requests; }
TSMEM_EXPORT int64_t faults_refused() { return refused; }
TSMEM_EXPORT int64_t faults_live_bytes() { return live; }
