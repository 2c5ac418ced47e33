// Raw ops by PyTorch's operators, for tensors on devices that have no kernels of ours.
#pragma once
#include <torch/library.h>

namespace tsmem::composed {

void register_act(torch::Library& m, c10::DispatchKey key);
void register_max_pool(torch::Library& m, c10::DispatchKey key);
void register_norm(torch::Library& m, c10::DispatchKey key);

// All of them, for one device's tensors.
inline void register_all(torch::Library& m, c10::DispatchKey key) {
  register_act(m, key);
  register_max_pool(m, key);
  register_norm(m, key);
}

// Refuses public ops under that device's autocast.
void refuse_autocast(torch::Library& m, c10::DispatchKey autocast_key);

}  // namespace tsmem::composed
