// cuDNN's fused graphs of a convolution whose input is relu(scale * x + shift), which is never in memory: the
// convolution itself, and the gradient of its weight. Without torch, so that plans are built where there is no device
// (tests/cuda/build_plans.cpp).
//
// Maps are dense with their channels innermost (channels_last), weights too; groups are 1.
// Source: cuDNN's developer guide, "Supported graph patterns", generic run-time and specialised pre-compiled engines.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dtype.h"

struct cudnnContext;

namespace tsmem::cuda {

enum class FusedGraph { convolution, weight_gradient };

struct FusedConv {
  Dtype dtype = Dtype::f16;                    // of maps, weight, scale and shift: f16 or bf16
  std::vector<int64_t> input, weight, output;  // sizes: [N, C, H, W], [K, C, R, S], [N, K, H', W']
  std::vector<int64_t> stride, padding, dilation;
};

// A graph that cuDNN has an engine for.
struct FusedPlan;
using FusedPlanPtr = std::shared_ptr<const FusedPlan>;

// Loads cuDNN by the name of its library (one that is loaded serves again). An empty string, or why it can't be used.
std::string load_cudnn(const std::string& library);

// Where plans are built: on the device of a handle, or for a device that is described as cuDNN's device properties are
// in JSON, without one. sm: its compute capability, as 90.
struct PlanFor {
  cudnnContext* handle = nullptr;
  std::string description;
  int sm = 0;
};

// Null where cuDNN has no engine; `why` says what it answered.
FusedPlanPtr build_plan(FusedGraph graph, const FusedConv& conv, const PlanFor& device, std::string& why);

int64_t workspace_bytes(const FusedPlan& plan);
std::string engine_name(const FusedPlan& plan);

// Pointers to memory of the device. `other`: the weight, or the output's gradient; `result`: the output, or the
// weight's gradient; sums: two vectors of K floats that the convolution writes (its output's sums and sums of squares),
// which the gradient does not have.
struct FusedOperands {
  const void *x = nullptr, *scale = nullptr, *shift = nullptr, *other = nullptr;
  void* result = nullptr;
  float* sums[2] = {};
  void* workspace = nullptr;
};
// On the handle's stream. An empty string, or what went wrong.
std::string run_plan(const FusedPlan& plan, cudnnContext* handle, const FusedOperands& operands);

}  // namespace tsmem::cuda
