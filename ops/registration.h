// Each file of ops gives PyTorch's dispatcher its schemas and implementations by a function; registration.cpp calls all
// of them.
#pragma once
#include <torch/library.h>

namespace tsmem {

void register_act(torch::Library& m);
void register_act_cpu(torch::Library& m);
void register_act_meta(torch::Library& m);
void register_addmm(torch::Library& m);
void register_add_mul_cat(torch::Library& m);
void register_attention(torch::Library& m);
void register_autocast(torch::Library& m);
void register_batch_norm_act(torch::Library& m);
void register_batch_norm_act_max_pool2d(torch::Library& m);
void register_cheap_ops(torch::Library& m);
void register_checkpoint(torch::Library& m);
void register_composed_act(torch::Library& m);
void register_conv(torch::Library& m);
void register_conv_batch_norm_act(torch::Library& m);
void register_conv_output_size(torch::Library& m);
void register_copies(torch::Library& m);
void register_cross_entropy(torch::Library& m);
void register_dropout(torch::Library& m);
void register_einsum(torch::Library& m);
void register_fourier(torch::Library& m);
void register_glu(torch::Library& m);
void register_group_norm_act(torch::Library& m);
void register_group_norm_cpu(torch::Library& m);
void register_grouped_mm(torch::Library& m);
void register_instance_norm_act(torch::Library& m);
void register_keep(torch::Library& m);
void register_layer_norm(torch::Library& m);
void register_linear(torch::Library& m);
void register_linear_cross_entropy(torch::Library& m);
void register_max_pool(torch::Library& m);
void register_max_pool_cpu(torch::Library& m);
void register_max_pool_meta(torch::Library& m);
void register_mul_act(torch::Library& m);
void register_norm(torch::Library& m);
void register_norm_cpu(torch::Library& m);
void register_norm_meta(torch::Library& m);
void register_norm_pool_cpu(torch::Library& m);
void register_norm_relu_conv(torch::Library& m);
void register_offload(torch::Library& m);
void register_prelu(torch::Library& m);
void register_prelu_cpu(torch::Library& m);
void register_recipe_of(torch::Library& m);
void register_rrelu(torch::Library& m);
void register_rms_norm(torch::Library& m);
void register_rnn(torch::Library& m);
void register_rnn_cpu(torch::Library& m);
void register_rnn_meta(torch::Library& m);
void register_scale_grad_cpu(torch::Library& m);
void register_shape_ops(torch::Library& m);
void register_vmap(torch::Library& m);

}  // namespace tsmem
