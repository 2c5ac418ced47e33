// In place of ATen's header of this name, for the build under ThreadSanitizer: at::parallel_for on threads that it can
// follow. It knows nothing of OpenMP's, whose runtime isn't instrumented.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#define INTRA_OP_PARALLEL

namespace at::internal {

template <typename F>
inline void invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  int64_t threads = at::get_num_threads();
  if (grain_size > 0) threads = std::min(threads, divup(end - begin, grain_size));
  const int64_t chunk = divup(end - begin, threads);
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;
  std::vector<std::thread> others;
  const auto run = [&](int64_t id) {
    const int64_t first = begin + id * chunk;
    if (first >= end) return;
    try {
      ThreadIdGuard guard(static_cast<int>(id));
      f(first, std::min(end, first + chunk));
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  };
  for (int64_t id = 1; id < threads; ++id) others.emplace_back(run, id);
  run(0);
  for (std::thread& t : others) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace at::internal
