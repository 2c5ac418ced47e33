// Elementwise activations, by name as in an op's schema: act="leaky_relu", act_args=[0.01].
// Plain C++, no torch headers: shared by ops/, ops/cpu and ops/cuda.
#pragma once
#include <cstdint>

namespace tsmem {

enum class ActKind : int32_t {
  identity,
  relu,
  hardtanh /*lo, hi*/,
  threshold /*threshold, value*/,
  leaky_relu /*slope*/,
  hardsigmoid,
  silu,
  hardswish,
  gelu,
  gelu_tanh,
  sigmoid,
  tanh,
  elu /*alpha, scale, input_scale*/,
  softplus /*beta, threshold*/,
  mish,
};

struct Act {
  ActKind kind = ActKind::identity;
  double a = 0, b = 0, c = 0;
};

// As the raw ops have it in their arguments.
inline Act act_of(int64_t kind, double a, double b, double c = 0) { return {static_cast<ActKind>(kind), a, b, c}; }

// True where the derivative is a function of one bit an element: 0 or a constant.
inline bool one_bit(ActKind k) { return k >= ActKind::relu && k <= ActKind::hardsigmoid; }

}  // namespace tsmem
