// Two ways to compute the same, a plain one and a fused one, of which the faster is taken: found at the first use for
// a shape.
#pragma once
#include <ATen/ATen.h>
#ifndef TSMEM_EMULATE_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tsmem::cuda {

struct Trial {
  bool equal = false;                           // both gave the same
  double plain_seconds = 0, fused_seconds = 0;  // medians; emulated, 0
  std::string failed;                           // why the fused one did not run, or empty
  bool takes_fused() const { return equal && fused_seconds <= plain_seconds; }
  // A sentence.
  std::string said() const {
    if (!failed.empty()) return "plain, as the fused way did not run: " + failed;
    if (!equal) return "plain, as the fused way gave other numbers";
    return c10::str(takes_fused() ? "fused" : "plain", " (", plain_seconds * 1e6, " us plain, ", fused_seconds * 1e6,
                    " us fused)");
  }
};

// What was found so far, by the name and shape of what is computed.
struct Trials {
  std::mutex mutex;
  std::map<std::string, Trial> found;
};
inline Trials& trials() {
  static Trials all;
  return all;
}

#ifdef TSMEM_EMULATE_CUDA
inline bool is_capturing() { return false; }
template <class F>
double seconds_of(F&&) {
  return 0;
}
#else
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}
// On the device, of one call.
template <class F>
double seconds_of(F&& f) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  f();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end) * 1e-3;
}
#endif

// Whether the fused way is taken for `key`. At its first use both run, in turns, and wait for the device: neither may
// have effects. same(): whether they gave the same. Nothing is tried, and the plain way taken, while a CUDA graph is
// captured, and where the device has no memory for both.
template <class Plain, class Fused, class Same>
bool takes_fused(const std::string& key, Plain&& plain, Fused&& fused, Same&& same) {
  Trials& all = trials();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto known = all.found.find(key);
    if (known != all.found.end()) return known->second.takes_fused();
  }
  if (is_capturing()) return false;
  constexpr int kRounds = 5;
  Trial trial;
  try {
    trial.equal = same(plain(), fused());
    std::vector<double> plain_times, fused_times;
    for (int i = 0; trial.equal && i < kRounds; ++i) {
      plain_times.push_back(seconds_of([&] { plain(); }));
      fused_times.push_back(seconds_of([&] { fused(); }));
    }
    if (trial.equal) {
      std::sort(plain_times.begin(), plain_times.end());
      std::sort(fused_times.begin(), fused_times.end());
      trial.plain_seconds = plain_times[kRounds / 2];
      trial.fused_seconds = fused_times[kRounds / 2];
    }
  } catch (const c10::OutOfMemoryError&) {
    return false;
  } catch (const c10::Error& e) {
    trial.failed = e.what_without_backtrace();
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.found.emplace(key, trial).first->second.takes_fused();
}

}  // namespace tsmem::cuda
