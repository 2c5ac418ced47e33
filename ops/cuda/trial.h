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
#include <optional>
#include <string>
#include <vector>

namespace tsmem::cuda {

// What is computed: a Computed, and all numbers that its time depends on, the device's index among them.
enum class Computed : int64_t { norm, norm_gradient, convolution, weight_gradient };
using TrialKey = std::vector<int64_t>;

struct Trial {
  std::string name;                             // of what is computed, for people
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

// What was found so far.
struct Trials {
  std::mutex mutex;
  std::map<TrialKey, Trial> found;
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

// Whether the fused way is taken for `key`; nothing where that has not been tried.
inline std::optional<bool> known_to_take_fused(const TrialKey& key) {
  Trials& all = trials();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.found.find(key);
  return known == all.found.end() ? std::nullopt : std::optional(known->second.takes_fused());
}

// From now on the fused way is not taken for `key`.
inline void give_up_fused(const TrialKey& key, const std::string& name, const std::string& why) {
  Trials& all = trials();
  std::lock_guard<std::mutex> lock(all.mutex);
  Trial& trial = all.found[key];
  trial.name = name;
  trial.equal = false;
  trial.failed = why;
}

// Whether the fused way is taken for `key`. At its first use both run, in turns, and wait for the device: neither may
// have effects. name(): what is computed. same(): whether they gave the same; nothing (std::nullopt) where their
// results don't tell, as those that are not finite: then the next use tries. Nothing is tried, and the plain way taken,
// while a CUDA graph is captured.
template <class Name, class Plain, class Fused, class Same>
bool takes_fused(const TrialKey& key, Name&& name, Plain&& plain, Fused&& fused, Same&& same) {
  if (const auto known = known_to_take_fused(key)) return *known;
  if (is_capturing()) return false;
  constexpr int kRounds = 5;
  Trial trial;
  trial.name = name();
  try {
    const std::optional<bool> equal = same(plain(), fused());
    if (!equal) return false;
    trial.equal = *equal;
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
    trial.equal = false;
    trial.failed = "there was no memory to try it";
  } catch (const c10::Error& e) {
    trial.equal = false;
    trial.failed = e.what_without_backtrace();
  }
  Trials& all = trials();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.found.emplace(key, trial).first->second.takes_fused();
}

}  // namespace tsmem::cuda
