// Under torch.func.vmap the ops run PyTorch's own operators, which have batching rules.
//
// Every op computes with PyTorch's operators where its tensors are not plain() ones, batched ones among them. The
// dispatcher takes a batched tensor to vmap's fallback all the same, which calls an op once a sample and refuses those
// that write to a buffer or take lists: here it is taken to the op itself.

#include "common.h"
#include "registration.h"

namespace tsmem {
namespace {

// An op's one body is registered for every backend (CompositeImplicitAutograd), so the CPU's entry has it.
void run_body(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace

void register_vmap(torch::Library& m) {
  // tests/ops/test_vmap.py checks that none is missing. contiguous and reshape have theirs in copies.cpp.
  for (const char* name : {"act",
                           "adaptive_avg_pool1d",
                           "adaptive_avg_pool2d",
                           "adaptive_avg_pool3d",
                           "adaptive_max_pool1d",
                           "adaptive_max_pool2d",
                           "adaptive_max_pool3d",
                           "add",
                           "addmm",
                           "avg_pool1d",
                           "avg_pool2d",
                           "avg_pool3d",
                           "baddbmm",
                           "batch_norm_act",
                           "batch_norm_act_max_pool2d",
                           "batch_norm_act_stats",
                           "batch_norm_add_act",
                           "bmm",
                           "cat",
                           "composed_act",

                           "_convolution",
                           "_convolution.deprecated",
                           "_convolution_mode",
                           "_grouped_mm",
                           "conv1d",
                           "conv1d.padding",
                           "conv2d",
                           "conv2d.padding",
                           "conv3d",
                           "conv3d.padding",
                           "conv_batch_norm_act",
                           "conv_output_size",
                           "conv_output_size.dim",
                           "conv_transpose1d",
                           "conv_transpose2d.input",
                           "conv_transpose3d.input",
                           "cross_entropy_loss",
                           "einsum",
                           "fft_fft",
                           "fft_rfft",
                           "fft_rfft2",
                           "fft_rfftn",
                           "glu",
                           "group_norm",
                           "group_norm_act",
                           "gru.data",
                           "gru.data_effect",
                           "gru.input",
                           "gru.input_effect",
                           "instance_norm_act",
                           "keep",
                           "layer_norm",
                           "linear",
                           "linear_cross_entropy",
                           "linear_output_size",
                           "linear_output_size.dim",
                           "lstm.data",
                           "lstm.data_effect",
                           "lstm.input",
                           "lstm.input_effect",
                           "matmul",
                           "max_pool1d",
                           "max_pool2d",
                           "max_pool3d",
                           "mm",
                           "mul",
                           "mul_act",
                           "mul_batch_norm_act",
                           "pad",
                           "prelu",
                           "reflection_pad1d",
                           "reflection_pad2d",
                           "reflection_pad3d",
                           "replication_pad1d",
                           "replication_pad2d",
                           "replication_pad3d",
                           "rms_norm",

                           "rnn_relu.data",
                           "rnn_relu.data_effect",
                           "rnn_relu.input",
                           "rnn_relu.input_effect",
                           "rnn_tanh.data",
                           "rnn_tanh.data_effect",
                           "rnn_tanh.input",
                           "rnn_tanh.input_effect",
                           "roll",
                           "rrelu",
                           "scaled_dot_product_attention",
                           "scaled_dot_product_attention.draw",
                           "softmax",
                           "stft",
                           "stft.center",
                           "tensordot"})
    m.impl(name, c10::DispatchKey::FuncTorchBatched, torch::CppFunction::makeFromBoxedFunction<&run_body>());
  // Before vmap sees anything, so that PyTorch's own operators inside obey its randomness, on tensors from outside too.
  for (const char* name :
       {"alpha_dropout", "alpha_dropout.effect", "dropout", "dropout.effect", "feature_alpha_dropout",
        "feature_alpha_dropout.effect", "feature_dropout", "feature_dropout.effect"})
    m.impl(name, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
           torch::CppFunction::makeFromBoxedFunction<&run_body>());
}

}  // namespace tsmem
