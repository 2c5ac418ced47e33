// One function a file; all.cpp lists them in order.
#pragma once
#include "ops/act_table.h"
#include "patterns/pattern.h"

namespace tsmem {

Pattern bn_act_max_pool();
Pattern bn_add_act();
Pattern bn_act_mul();
Pattern bn_act();
Pattern batch_norm();
Pattern conv_bn_act();
Pattern conv_bn_act_recompute();
Pattern act_mul();
Pattern activation();
Pattern convolution();
Pattern cross_entropy();
Pattern dropout();
Pattern max_pool();
Pattern shape_only();
Pattern smooth_activation();
Pattern linear();
Pattern linear_cross_entropy();
Pattern addmm();
Pattern einsum();
Pattern composed_activation();
Pattern layer_norm();
Pattern rms_norm();
Pattern group_norm_act();
Pattern instance_norm();
Pattern cat();
Pattern add();
Pattern attention();
Pattern copies();
Pattern rnn();
Pattern softmax();
Pattern mul();
Pattern pointwise();
Pattern lookup();
Pattern prelu();
Pattern glu();
Pattern rrelu();

// The activations of which backward needs that much: one bit an element, or the input.
inline std::set<std::string> activations_that_save(ActSaves saves) {
  std::set<std::string> names;
  for (const ActInfo& info : kActivations)
    if (info.saves == saves) names.insert(info.name);
  return names;
}

// The arguments of aten::batch_norm in a pattern, in order.
inline const std::string kBatchNorm = "%y, %gamma, %beta, %mean, %var, %train, %momentum, %eps, %cudnn";

}  // namespace tsmem
