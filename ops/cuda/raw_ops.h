// Registers the raw ops (tsmem::_…: norm_ops.h, act.cpp, max_pool.cpp) for the device.
#pragma once
#include <torch/library.h>

namespace tsmem::cuda {

// Each gives the implementations of its file's ops.
void implement_norm(torch::Library& m);
void implement_pool(torch::Library& m);
void implement_mask(torch::Library& m);
void implement_dropout(torch::Library& m);
void implement_graph(torch::Library& m);
void implement_cudnn(torch::Library& m);
void implement_ways(torch::Library& m);

}  // namespace tsmem::cuda
