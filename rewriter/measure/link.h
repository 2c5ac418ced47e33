// The link between a device and the host's memory, over which outputs are offloaded.
#pragma once
#include <string>

namespace tsmem {

// Bytes a second of large copies between `device` and pinned memory, in the slower direction. Throws
// Error(ErrorKind::request) for the CPU, whose memory is the host's.
double measured_link(const std::string& device);

// While it lives, the CPU and estimates have such a link, which is simulated (ops/simulated_link.h).
class SimulatedLink {
 public:
  explicit SimulatedLink(double bytes_per_second);
  ~SimulatedLink();
  SimulatedLink(const SimulatedLink&) = delete;
  SimulatedLink& operator=(const SimulatedLink&) = delete;

 private:
  double before_;
};

}  // namespace tsmem
