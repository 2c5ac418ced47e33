#include "patterns/all.h"

namespace tsmem {

const std::vector<Pattern>& all_patterns() {
  // Longer chains first: the first pattern that matches a node takes it.
  static const std::vector<Pattern> patterns = {
      composed_activation(),
      conv_bn_act_recompute(),
      conv_bn_act(),
      bn_act_max_pool(),
      bn_add_act(),
      bn_act_mul(),
      bn_act(),
      batch_norm(),
      group_norm_act(),
      instance_norm(),
      act_mul(),
      activation(),
      convolution(),
      dropout(),
      max_pool(),
      shape_only(),
      smooth_activation(),
      prelu(),
      glu(),
      rrelu(),
      linear_cross_entropy(),
      linear(),
      addmm(),
      einsum(),
      layer_norm(),
      rms_norm(),
      cat(),
      add(),
      mul(),
      attention(),
      rnn(),
      softmax(),
      cross_entropy(),
      copies(),
      pointwise(),
      lookup(),
  };
  return patterns;
}

}  // namespace tsmem
