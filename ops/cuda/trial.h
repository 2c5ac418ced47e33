// Two ways to compute the same, a plain one and a fused one, of which the faster is taken: found at the first use for
// a shape.
#pragma once
#include <ATen/ATen.h>
#ifndef TSMEM_EMULATE_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tsmem::cuda {

// What is computed, by all numbers that its time depends on. layer: a Computed, the device's index, and whatever a
// layer of a model has for every input. sizes: the input's.
enum class Computed : int64_t { norm, norm_gradient, convolution, weight_gradient };
struct TrialKey {
  std::vector<int64_t> layer, sizes;
  auto operator<=>(const TrialKey&) const = default;
};

// A layer whose input has other sizes at every step is tried for so many of them: a trial takes longer than it gains
// in a few steps.
constexpr size_t kMostSizes = 16;

struct Trial {
  std::string name;                             // of what is computed, for people
  bool done = false;                            // else the results of all uses so far told nothing
  uint64_t uses = 0;                            // until it was done
  bool equal = false;                           // both gave the same
  double plain_seconds = 0, fused_seconds = 0;  // medians; emulated, 0
  std::string failed;                           // why the fused one did not run, or empty
  bool takes_fused() const { return equal && fused_seconds <= plain_seconds; }
  // A sentence.
  std::string said() const {
    if (!done) return "plain so far, as the results that could be compared were all zeros or not finite";
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
// On the device, of one call; another before it keeps the device at work meanwhile, as it is in training.
template <class F>
double seconds_of(F&& f) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  f();
  begin.record();
  f();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end) * 1e-3;
}
#endif

// Whether the fused way is taken for `key`; nothing where that is still to be tried.
inline std::optional<bool> known_to_take_fused(const TrialKey& key) {
  Trials& all = trials();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (const auto known = all.found.find(key); known != all.found.end())
    return known->second.done ? std::optional(known->second.takes_fused()) : std::nullopt;
  size_t tried = 0;
  for (auto at = all.found.lower_bound({key.layer, {}}); at != all.found.end() && at->first.layer == key.layer; ++at)
    ++tried;
  return tried < kMostSizes ? std::nullopt : std::optional(false);
}

// Why an operation failed, in few words.
inline std::string why_failed(const c10::Error& e) {
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&e) != nullptr;
  return memory ? "there was no memory for it" : e.what_without_backtrace();
}

// From now on the fused way is not taken for `key`.
inline void give_up_fused(const TrialKey& key, const std::string& name, const std::string& why) {
  Trials& all = trials();
  std::lock_guard<std::mutex> lock(all.mutex);
  Trial& trial = all.found[key];
  trial.name = name;
  trial.done = true;
  trial.equal = false;
  trial.failed = why;
}

// Whether the fused way is taken for `key`. At its first use both run, in turns, and wait for the device: neither may
// have effects. name(): what is computed. same(): whether they gave the same; nothing (std::nullopt) where their
// results don't tell, as those that are all zeros or not finite: then a later use tries, the second, fourth, eighth, so
// that a model for which they never tell is not slow. Nothing is tried, and the plain way taken, while a CUDA graph is
// captured.
template <class Name, class Plain, class Fused, class Same>
bool takes_fused(const TrialKey& key, Name&& name, Plain&& plain, Fused&& fused, Same&& same) {
  if (const auto known = known_to_take_fused(key)) return *known;
  if (is_capturing()) return false;
  constexpr int kRounds = 3;
  Trials& all = trials();
  Trial trial;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    Trial& so_far = all.found[key];
    if (so_far.name.empty()) so_far.name = name();
    if (!std::has_single_bit(++so_far.uses)) return false;
    trial = so_far;
  }
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
  } catch (const c10::Error& e) {
    trial.equal = false;
    trial.failed = why_failed(e);
  }
  trial.done = true;
  std::lock_guard<std::mutex> lock(all.mutex);
  Trial& found = all.found[key];
  if (!found.done) found = trial;  // else another thread was faster
  return found.takes_fused();
}

}  // namespace tsmem::cuda
