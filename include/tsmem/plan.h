// What is asked of a plan, and what comes of it, as plain data. A plan says of every output that backward could
// recompute whether it does, so that a training step's peak fits a budget and takes as little time as possible.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

struct SolverLimits {
  double seconds = 0;  // of one solve; 0: 2 s, and more for large programs and the smallest peak
  double gap = 0.005;  // how far from the best it may end, as a fraction of a step's seconds
};

// What becomes of an output that backward needs. offload: it waits in the host's memory.
enum class Fate : char { keep, recompute, offload };

using Choice = std::vector<Fate>;  // of every site

struct PlanOptions {
  std::string method = "forward", device = "cpu";
  uint64_t seed = 0;
  bool offload = false;   // outputs may wait in the host's memory
  double link = 0;        // bytes a second between device and host, each way; 0: measured. Simulated on the CPU
  bool estimate = false;  // run nothing: shapes from the meta device, seconds from FLOPs and bytes
  SolverLimits solver;
  std::function<void(const std::string&)> progress;  // is told what runs now
};

// What a training step needs under one choice.
struct PlanPoint {
  int64_t budget = 0;                // bytes; what was asked for
  int64_t predicted_peak_bytes = 0;  // as Profile::peak_bytes
  double predicted_seconds = 0;      // a step, forward and backward
  int64_t kept_bytes = 0;            // as Profile::saved_bytes
  double recomputed_flops = 0;       // that backward adds
  int64_t offloaded_bytes = 0;       // that go to the host and come back
  Choice choice;
  double gap = 0;  // the choice is at most this fraction of a step slower than the program's best
};

// A plan to choose, and what else to say of it.
struct PlanRequest {
  std::string budget;                // "2GiB", or "40%" of the original's peak; empty: the smallest peak
  std::string fit;                   // say the largest batch that trains in this much memory, such as "80GiB"
  std::vector<int64_t> batch_sizes;  // say what these need
  int optimizer_states = 0;          // tensors of a parameter's size that the optimizer holds for it
  PlanOptions how;
};

// What a training step with one batch size needs.
struct BatchMemory {
  int64_t batch = 0;        // 0: none fits
  int64_t peak_bytes = 0;   // as Profile::peak_bytes
  int64_t total_bytes = 0;  // with weights, gradients, optimizer states and the input
  bool measured = false;    // a step was run; else in proportion to two that were
};

struct OriginalStep {
  int64_t peak_bytes = 0, saved_bytes = 0;
  double seconds = 0;
};

// The plan that a model was rewritten by.
struct ChosenPlan {
  struct Op {
    std::string module, op;
  };
  PlanPoint point;
  OriginalStep original;
  std::vector<Op> run_again;  // convolutions, linear layers and the like that run again in backward
  std::vector<Op> offloaded;  // whose outputs are offloaded
  std::string solver;
  double solve_seconds = 0;
  struct Batches {
    int64_t weight_bytes = 0, gradient_and_optimizer_bytes = 0;
    std::vector<BatchMemory> asked;
    int64_t fit_bytes = 0;
    std::optional<BatchMemory> largest;  // in fit_bytes
  };
  std::optional<Batches> batches;  // where the request asks for them
};

// Points from the smallest budget to the original's peak.
struct PlanFront {
  std::vector<PlanPoint> points;
  OriginalStep original;
  std::string solver;
  double solve_seconds = 0;
  size_t solves = 0;
};

}  // namespace tsmem
