// What cross_entropy_loss and linear_cross_entropy share.
#pragma once
#include "common.h"

namespace tsmem {

// Of each target its class's weight (1 without weights), 0 for one that is ignored. A target that is no class gets some
// class's: nll_loss raises for it.
at::Tensor weights_of_targets(const at::Tensor& target, const OptTensor& class_weight, int64_t ignore_index,
                              at::ScalarType dtype);

}  // namespace tsmem
