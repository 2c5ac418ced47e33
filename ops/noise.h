// Noise of dropouts that backward draws again, from a copy of the default generator's state.
#pragma once
#include <ATen/ATen.h>

namespace tsmem {

// Fills `noise` with zeros, with probability p, and ones, as at::bernoulli_ on the default generator of its device
// does, and leaves that where it would be. `state`: what draw_from() draws the same from. The draws don't depend on the
// dtype on the CPU.
at::Tensor draw(at::Tensor noise, double p, at::Tensor* state);
at::Tensor draw_from(const at::Tensor& state, at::Tensor noise, double p);

}  // namespace tsmem
