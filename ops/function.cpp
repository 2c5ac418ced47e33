// Gradients of a batch, one at a time.
#include "function.h"

#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>

// After torch.func's header, whose calls its names would make ambiguous.
#include <ATen/LegacyBatchedTensorImpl.h>

#include <algorithm>
#include <optional>

namespace tsmem {
namespace {

using at::Tensor;

// The innermost vmap that a tensor is a batch of. torch.autograd has batched tensors of its own, torch.func others.
struct Vmap {
  int64_t level;
  bool functorch;
  bool operator==(const Vmap& other) const { return level == other.level && functorch == other.functorch; }
};

std::optional<Vmap> vmap_of(const Tensor& t) {
  if (!t.defined()) return {};
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(t)) return Vmap{batched->level(), true};
  if (const auto* batched = at::maybeGetBatchedImpl(t)) return Vmap{batched->bdims().back().level(), false};
  return {};
}

// Each of the batch.
std::vector<Tensor> unbatched(const Tensor& t, const Vmap& vmap) {
  if (vmap.functorch) {
    const auto* batched = at::functorch::maybeGetBatchedImpl(t);
    return batched->value().unbind(batched->bdim());
  }
  const auto* batched = at::maybeGetBatchedImpl(t);
  const int64_t size = batched->value().size(batched->bdims().back().dim());
  return at::_remove_batch_dim(t, vmap.level, size, 0).unbind(0);
}

Tensor batched(const std::vector<Tensor>& each, const Vmap& vmap) {
  const Tensor all = at::stack(each);
  return vmap.functorch ? at::functorch::makeBatched(all, 0, vmap.level) : at::_add_batch_dim(all, 0, vmap.level);
}

// Outside of torch.func's vmap while this lives.
class Outside {
 public:
  explicit Outside(const Vmap& vmap) {
    const auto layer = at::functorch::maybeCurrentDynamicLayer();
    if (vmap.functorch && layer && layer->layerId() == vmap.level) layer_ = at::functorch::popDynamicLayer();
  }
  ~Outside() {
    if (layer_) at::functorch::pushDynamicLayer(std::move(*layer_));
  }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  std::optional<at::functorch::DynamicLayer> layer_;
};

}  // namespace

Gradients one_at_a_time(const Gradients& grads, const std::function<Gradients(const Gradients&)>& f) {
  std::optional<Vmap> vmap;
  for (const Tensor& g : grads)
    if (const auto of = vmap_of(g); of && (!vmap || of->level > vmap->level)) vmap = of;
  if (!vmap) return f(grads);

  std::vector<std::vector<Tensor>> given;  // a gradient, each of the batch; none: the same for all
  size_t size = 0;
  std::vector<Gradients> found;
  {
    const Outside outside(*vmap);
    for (const Tensor& g : grads) {
      given.push_back(vmap_of(g) == vmap ? unbatched(g, *vmap) : std::vector<Tensor>());
      size = std::max(size, given.back().size());
    }
    for (size_t i = 0; i < size; ++i) {
      Gradients each;
      for (size_t k = 0; k < grads.size(); ++k) each.push_back(given[k].empty() ? grads[k] : given[k][i]);
      found.push_back(one_at_a_time(each, f));
    }
  }
  Gradients result(found.empty() ? 0 : found.front().size());
  for (size_t k = 0; k < result.size(); ++k) {
    std::vector<Tensor> of_each;
    for (const Gradients& g : found) of_each.push_back(g[k]);
    if (of_each.front().defined()) result[k] = batched(of_each, *vmap);
  }
  return result;
}

}  // namespace tsmem
