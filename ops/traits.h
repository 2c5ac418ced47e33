// What the rewriter needs to know of the operators of this library. An operator that is not listed has none of these
// traits.
#pragma once
#include <string_view>

namespace tsmem {

struct OperatorTraits {
  std::string_view name;      // qualified; for all overloads
  bool expensive = false;     // a product of matrices or a convolution: computing it again takes much time
  bool may_be_cheap = false;  // but little, where it takes few operations (is_cheap_layer)
  bool calls_method = false;  // only calls a method of a module, in which the operators are
};

inline constexpr OperatorTraits kOperatorTraits[] = {
    {.name = "tsmem::_convolution", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::_convolution_mode", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::_grouped_mm", .expensive = true},
    {.name = "tsmem::addmm", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::autocast", .calls_method = true},
    {.name = "tsmem::baddbmm", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::bmm", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::checkpoint", .calls_method = true},
    {.name = "tsmem::conv1d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::conv2d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::conv3d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::conv_batch_norm_act", .expensive = true},
    {.name = "tsmem::conv_transpose1d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::conv_transpose2d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::conv_transpose3d", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::einsum", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::linear", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::matmul", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::mm", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::scaled_dot_product_attention", .expensive = true, .may_be_cheap = true},
    {.name = "tsmem::tensordot", .expensive = true, .may_be_cheap = true},
};

// Whether a convolution or linear layer takes so little time that backward may run it again: one of at most 96 features
// or channels with 1x1 filters, of 10 with 3x3, and a depthwise one (as many groups as channels) of 3x3, which is no
// product of matrices and takes up to eight times as long. operations: of an element of its output, two for each of the
// weight's elements that it meets, as a product does them.
constexpr bool is_cheap_layer(double operations) { return operations <= 192; }
constexpr double as_in_a_product(double operations, bool depthwise) { return operations * (depthwise ? 8 : 1); }

// Whether such a layer may run again where others, of so many operations, have to run for its input: an MLP's first one
// behind attention's last.
constexpr bool is_cheap_after(double others, double operations) { return 2 * others <= operations; }

// Whether attention takes so little of a transformer's time that backward may run it again. features: of all heads
// together. An element of its output takes two products a key, and the linear layers beside it, forward and backward,
// 36 a feature: at a third of a key a feature, 1/54 of the time. With a causal mask there are half as many keys.
constexpr bool is_cheap_attention(double keys, double features, bool causal) {
  return (causal ? keys / 2 : keys) * 3 <= features;
}

constexpr OperatorTraits traits_of(std::string_view name) {
  for (const OperatorTraits& t : kOperatorTraits)
    if (t.name == name) return t;
  return {.name = name};
}

}  // namespace tsmem
