// The CUDA ops on the emulated device (emulate.h), as tsmem_emulated::_… for CPU tensors: the schemas of tsmem::_….
#include "cuda/raw_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>

namespace {

void implement(torch::Library& m) {
  tsmem::cuda::implement_norm(m);
  tsmem::cuda::implement_pool(m);
  tsmem::cuda::implement_mask(m);
  tsmem::cuda::implement_dropout(m);
  tsmem::cuda::implement_cudnn(m);
  tsmem::cuda::implement_ways(m);
}

constexpr const char* kNames[] = {"_act_mask",
                                  "_act_mask_backward",
                                  "_max_pool",
                                  "_max_pool_backward",
                                  "_batch_norm_act_forward",
                                  "_batch_norm_act_backward",
                                  "_batch_norm_act_apply",
                                  "_batch_norm_act_max_pool2d_forward",
                                  "_batch_norm_act_max_pool2d_backward",
                                  "_batch_norm_act_max_pool2d_apply",
                                  "_group_norm_act_forward",
                                  "_group_norm_act_backward",
                                  "_group_norm_act_apply",
                                  "_scale_grad",
                                  "_fused_dropout",
                                  "_fused_dropout_again",
                                  "_may_take_norm_relu_conv",
                                  "_norm_relu_conv",
                                  "_norm_relu_conv_weight_gradient",
                                  "_ways"};
}  // namespace

TORCH_LIBRARY(tsmem_emulated, m) {
  for (const char* name : kNames) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("tsmem::") + name).c_str(), "");
    m.def(op.schema().cloneWithName(std::string("tsmem_emulated::") + name, ""));
  }
}
TORCH_LIBRARY_IMPL(tsmem_emulated, CPU, m) { implement(m); }

// In place of the CPU's kernels too, where asked for: the tests of the public ops then run on these.
TORCH_LIBRARY_IMPL(tsmem, CPU, m) {
  if (std::getenv("TSMEM_EMULATED_CUDA")) implement(m);
}
