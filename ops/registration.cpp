#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "composed/composed.h"

namespace tsmem {
namespace {

// Whether a copy of this library from another path has registered the operators of this process. This one then leaves
// them to it: LibTorch would end the process at the second definition of a schema.
bool another_copy_registered() { return c10::Dispatcher::singleton().findSchema({"tsmem::act", ""}).has_value(); }

TORCH_LIBRARY_FRAGMENT(tsmem, m) {
  if (another_copy_registered()) return;
  register_act(m);
  register_act_cpu(m);
  register_act_meta(m);
  register_addmm(m);
  register_add_mul_cat(m);
  register_attention(m);
  register_autocast(m);
  register_batch_norm_act(m);
  register_batch_norm_act_max_pool2d(m);
  register_cheap_ops(m);
  register_checkpoint(m);
  register_composed_act(m);
  register_conv(m);
  register_conv_batch_norm_act(m);
  register_conv_output_size(m);
  register_copies(m);
  register_cross_entropy(m);
  register_dropout(m);
  register_einsum(m);
  register_fourier(m);
  register_glu(m);
  register_group_norm_act(m);
  register_group_norm_cpu(m);
  register_grouped_mm(m);
  register_instance_norm_act(m);
  register_keep(m);
  register_layer_norm(m);
  register_linear(m);
  register_linear_cross_entropy(m);
  register_max_pool(m);
  register_max_pool_cpu(m);
  register_max_pool_meta(m);
  register_mul_act(m);
  register_norm(m);
  register_norm_cpu(m);
  register_norm_meta(m);
  register_norm_pool_cpu(m);
  register_norm_relu_conv(m);
  register_offload(m);
  register_prelu(m);
  register_prelu_cpu(m);
  register_recipe_of(m);
  register_rrelu(m);
  register_rms_norm(m);
  register_rnn(m);
  register_rnn_cpu(m);
  register_rnn_meta(m);
  register_scale_grad_cpu(m);
  register_shape_ops(m);
  register_vmap(m);  // it names the others' schemas
  // CUDA's are composed where its library isn't there (cuda_library.cpp).
  using c10::DispatchKey;
  for (const auto key : {DispatchKey::XPU, DispatchKey::HPU, DispatchKey::MPS, DispatchKey::PrivateUse1})
    composed::register_all(m, key);
  for (const auto key :
       {DispatchKey::AutocastXPU, DispatchKey::AutocastHPU, DispatchKey::AutocastMPS, DispatchKey::AutocastPrivateUse1})
    composed::refuse_autocast(m, key);
}

}  // namespace
}  // namespace tsmem
