// One function a file; all.cpp lists them in order.
#pragma once
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
Pattern dropout();
Pattern max_pool();
Pattern shape_only();
Pattern smooth_activation();
Pattern linear();
Pattern layer_norm();
Pattern instance_norm();
Pattern cat();
Pattern add();
Pattern attention();
Pattern copies();
Pattern softmax();
Pattern mul();

// Activations whose derivative is one of two numbers: 1 bit an element. And those whose derivative needs their input.
inline const std::set<std::string> kMasked = {"relu", "hardtanh", "threshold", "leaky_relu", "hardsigmoid"};
inline const std::set<std::string> kSmooth = {"silu", "hardswish", "gelu", "gelu_tanh", "elu", "softplus", "mish"};

// The arguments of aten::batch_norm in a pattern, in order.
inline const std::string kBatchNorm = "%y, %gamma, %beta, %mean, %var, %train, %momentum, %eps, %cudnn";

}  // namespace tsmem
