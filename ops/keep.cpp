// Makes TorchScript run a norm for its running statistics alone: a use of the norm's result that no pass drops, as it
// is said to overwrite the statistics.
#include <ATen/ATen.h>

#include "registration.h"

namespace tsmem {

static void keep_result(const at::Tensor&, const std::optional<at::Tensor>&) {}

void register_keep(torch::Library& m) {
  m.def("keep(Tensor result, Tensor(a!)? statistics) -> ()", TORCH_FN(keep_result));
}

}  // namespace tsmem
