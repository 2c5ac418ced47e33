// Elementwise activations, by name as in an op's schema: act="leaky_relu", act_args=[0.01]. act_table.h has a row for
// each. Plain C++17, no torch headers: shared by ops/, ops/cpu, ops/cuda and patterns/.
#pragma once
#include <cstdint>

namespace tsmem {

enum class ActKind : int32_t {
  identity,
  relu,
  hardtanh,
  threshold,
  leaky_relu,
  hardsigmoid,
  silu,
  hardswish,
  gelu,
  gelu_tanh,
  sigmoid,
  tanh,
  elu,
  softplus,
  mish,
  hardsigmoid_eager,
};

// An activation with its arguments, as many as its row says.
struct Act {
  ActKind kind = ActKind::identity;
  double a = 0, b = 0, c = 0;
};

// As _act_mask has it in its schema.
inline Act act_of(int64_t kind, double a, double b) { return {static_cast<ActKind>(kind), a, b}; }

}  // namespace tsmem
