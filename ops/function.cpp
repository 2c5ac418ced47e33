// Gradients of a batch, one at a time.
#include "function.h"

#include <ATen/ATen.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>
#include <torch/csrc/autograd/graph_task.h>

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

bool in_a_transform() {
  return at::functorch::functorchTLSAccessor() && at::functorch::maybeCurrentDynamicLayer().has_value();
}

// Without torch.func.grad's wrappers, which record nothing in a backward that is not differentiated itself.
Tensor unwrapped(Tensor t) {
  using at::functorch::TransformType;
  while (const auto* wrapper =
             t.defined() && !at::GradMode::is_enabled() ? at::functorch::maybeGetTensorWrapper(t) : nullptr) {
    const auto level = wrapper->level();
    const auto& layers = at::functorch::getDynamicLayerStack();
    const bool of_grad = level && *level >= 1 && *level <= static_cast<int64_t>(layers.size()) &&
                         layers[*level - 1].key() == TransformType::Grad;
    if (!of_grad) break;
    const Tensor inside = wrapper->value();
    t = inside;
  }
  return t;
}

// Each of the batch; of an empty one nothing.
std::vector<Tensor> unbatched(const Tensor& t, const Vmap& vmap) {
  if (vmap.functorch) {
    const auto* batched = at::functorch::maybeGetBatchedImpl(t);
    return batched->value().unbind(batched->bdim());
  }
  const auto* batched = at::maybeGetBatchedImpl(t);
  const int64_t size = batched->value().size(batched->bdims().back().dim());
  return at::_remove_batch_dim(t, vmap.level, size, 0).unbind(0);
}

Tensor batched(const Tensor& all, const Vmap& vmap) {
  return vmap.functorch ? at::functorch::makeBatched(all, 0, vmap.level) : at::_add_batch_dim(all, 0, vmap.level);
}

// Outside of the transforms of torch.func from `level` on.
class Outside {
 public:
  explicit Outside(int64_t level) {
    while (in_a_transform() && at::functorch::maybeCurrentDynamicLayer()->layerId() >= level)
      layers_.push_back(at::functorch::popDynamicLayer());
  }
  ~Outside() {
    for (; !layers_.empty(); layers_.pop_back()) at::functorch::pushDynamicLayer(std::move(layers_.back()));
  }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  std::vector<at::functorch::DynamicLayer> layers_;
};

thread_local bool others_wait = false;

// While this lives, other gradients of a batch wait for the same node.
struct Waiting {
  explicit Waiting(bool others) : before(others_wait) { others_wait |= others; }
  ~Waiting() { others_wait = before; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  const bool before;
};

}  // namespace

bool last_reader() { return !others_wait && !torch::autograd::get_current_graph_task_keep_graph(); }

Gradients one_at_a_time(const Gradients& given, const std::function<Gradients(const Gradients&)>& f) {
  // In torch.autograd's vmap nothing may be drawn: backward draws again what forward drew.
  const c10::impl::ExcludeDispatchKeyGuard no_vmap_mode(c10::DispatchKey::VmapMode);
  std::optional<Vmap> vmap;
  bool wrapped = false;
  for (const Tensor& g : given) {
    wrapped |= g.defined() && at::functorch::maybeGetTensorWrapper(g) != nullptr;
    if (const auto of = vmap_of(g); of && (!vmap || of->level > vmap->level)) vmap = of;
  }
  if (wrapped) {
    Gradients inside;
    for (const Tensor& g : given) inside.push_back(unwrapped(g));
    // Those of torch.func.jvp stay.
    const bool all = std::none_of(inside.begin(), inside.end(), [](const Tensor& g) {
      return g.defined() && at::functorch::maybeGetTensorWrapper(g) != nullptr;
    });
    return all ? one_at_a_time(inside, f) : f(given);
  }
  if (!vmap) {
    const Outside outside(1);
    return f(given);
  }

  const Outside outside(vmap->functorch ? vmap->level : INT64_MAX);
  std::vector<std::optional<std::vector<Tensor>>> batches;  // a gradient, each of the batch; none: the same for all
  size_t size = 0;
  for (const Tensor& g : given) {
    batches.emplace_back();
    if (vmap_of(g) != vmap) continue;
    batches.back() = unbatched(g, *vmap);
    size = batches.back()->size();
  }
  std::vector<Gradients> found;  // of each of the batch
  for (size_t i = 0; i < std::max<size_t>(size, 1); ++i) {
    Gradients each;
    for (size_t k = 0; k < given.size(); ++k)
      each.push_back(!batches[k] ? given[k]
                     : size == 0 ? at::zeros(given[k].sizes(), given[k].options())
                                 : (*batches[k])[i]);
    const Waiting waiting(i + 1 < size);
    found.push_back(one_at_a_time(each, f));
  }
  Gradients result(found.front().size());
  for (size_t k = 0; k < result.size(); ++k) {
    std::vector<Tensor> of_each;
    for (Gradients& g : found) of_each.push_back(std::move(g[k]));
    if (of_each.front().defined())
      result[k] = batched(at::stack(of_each).narrow(0, 0, static_cast<int64_t>(size)), *vmap);
  }
  return result;
}

}  // namespace tsmem
