#include "rewriter/measure/link.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "ops/simulated_link.h"
#include "rewriter/clock.h"
#include "rewriter/error.h"

namespace tsmem {

double measured_link(const std::string& device) {
  const c10::Device where(device);
  if (where.is_cpu() || where.is_meta())
    throw Error(ErrorKind::request,
                "Outputs of the CPU are in the host's memory already: to plan for a device that is not here, give the "
                "bytes a second of its link.",
                "link");
  constexpr int64_t kBytes = 64 << 20;
  const at::Tensor there = at::zeros({kBytes}, at::TensorOptions(where).dtype(at::kByte));
  at::Tensor here = at::empty({kBytes}, at::TensorOptions(at::kCPU).dtype(at::kByte).pinned_memory(true));
  double seconds = 0;
  // item() waits for what was begun.
  const auto copy = [&](const at::Tensor& to, const at::Tensor& from) {
    double shortest = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 5; ++i) {
      there[0].item();
      const auto start = Clock::now();
      to.copy_(from, /*non_blocking=*/true);
      there[0].item();
      shortest = std::min(shortest, seconds_since(start));
    }
    seconds = std::max(seconds, shortest);
  };
  copy(here, there);
  copy(there, here);
  return static_cast<double>(kBytes) / seconds;
}

SimulatedLink::SimulatedLink(double bytes_per_second) : before_(simulated_link()) { simulate_link(bytes_per_second); }
SimulatedLink::~SimulatedLink() { simulate_link(before_); }

}  // namespace tsmem
