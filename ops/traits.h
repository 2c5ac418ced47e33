// What the rewriter needs to know of the operators of this library. An operator that is not listed has none of these
// traits.
#pragma once
#include <string_view>

namespace tsmem {

struct OperatorTraits {
  std::string_view name;      // qualified; for all overloads
  bool expensive = false;     // a product of matrices or a convolution: computing it again takes much time
  bool first_layer = false;   // but little for a network's first layer, where that has few channels
  bool calls_method = false;  // only calls a method of a module, in which the operators are
};

inline constexpr OperatorTraits kOperatorTraits[] = {
    {.name = "tsmem::_convolution", .expensive = true, .first_layer = true},
    {.name = "tsmem::addmm", .expensive = true},
    {.name = "tsmem::autocast", .calls_method = true},
    {.name = "tsmem::baddbmm", .expensive = true},
    {.name = "tsmem::bmm", .expensive = true},
    {.name = "tsmem::checkpoint", .calls_method = true},
    {.name = "tsmem::conv1d", .expensive = true, .first_layer = true},
    {.name = "tsmem::conv2d", .expensive = true, .first_layer = true},
    {.name = "tsmem::conv3d", .expensive = true, .first_layer = true},
    {.name = "tsmem::conv_batch_norm_act", .expensive = true},
    {.name = "tsmem::conv_transpose1d", .expensive = true, .first_layer = true},
    {.name = "tsmem::conv_transpose2d", .expensive = true, .first_layer = true},
    {.name = "tsmem::conv_transpose3d", .expensive = true, .first_layer = true},
    {.name = "tsmem::linear", .expensive = true, .first_layer = true},
    {.name = "tsmem::matmul", .expensive = true},
    {.name = "tsmem::mm", .expensive = true},
    {.name = "tsmem::scaled_dot_product_attention", .expensive = true},
};

// So many operations for an element of its output a first layer may take: about what is recomputed elsewhere takes.
inline constexpr double kFewOperations = 100;

constexpr OperatorTraits traits_of(std::string_view name) {
  for (const OperatorTraits& t : kOperatorTraits)
    if (t.name == name) return t;
  return {.name = name};
}

}  // namespace tsmem
