// cross_entropy_loss: keeps its input (or what that is made from) and the targets. PyTorch's keeps the input's
// log_softmax beside it, and its backward makes two tensors of that size where this makes one, the gradient.
//
// log_softmax and softmax are those of PyTorch, of a few rows at a time, which stay in cache; 16-bit inputs are
// computed in float32.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>

#include "cross_entropy.h"
#include "function.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {

at::Tensor weights_of_targets(const at::Tensor& target, const OptTensor& class_weight, int64_t ignore_index,
                              at::ScalarType dtype) {
  const at::Tensor valid = target.ne(ignore_index);
  if (!class_weight) return valid.to(dtype);
  const at::Tensor classes = target.masked_fill(valid.logical_not(), 0).clamp_(0, class_weight->numel() - 1);
  return class_weight->to(dtype).take(classes).mul_(valid);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kBlock = 1 << 16;        // elements, of each of the CPU's threads
constexpr int64_t kDeviceBlock = 1 << 25;  // elsewhere

// x as [rows, classes], or, where a pixel's classes are not together, as [images, classes, pixels]; undefined where it
// is neither without a copy.
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  const Tensor last = x.movedim(1, -1);
  if (last.is_contiguous()) return last.reshape({-1, x.size(1)});
  return x.is_contiguous() ? x.view({x.size(0), x.size(1), -1}) : Tensor();
}

// Targets, or what there is one of for each of them, as the rows or [images, pixels] of as_rows().
Tensor as_rows(const Tensor& t, const Tensor& rows) {
  return rows.dim() == 2 ? t.reshape({-1}) : t.reshape({rows.size(0), rows.size(2)});
}

// f(part) for blocks of the rows, where part(t) is that block of a tensor of as_rows().
template <class F>
void each_part(const Tensor& rows, F f) {
  const int64_t images = rows.size(0), classes = rows.size(1), pixels = rows.dim() == 3 ? rows.size(2) : 1;
  const int64_t most = rows.is_cpu() ? kBlock * at::get_num_threads() : kDeviceBlock;
  const int64_t across =
      std::clamp<int64_t>(most / classes, rows.is_cpu() ? at::get_num_threads() : 1, images * pixels);
  const int64_t some_pixels = std::min(across, pixels);
  const int64_t some_images = std::max<int64_t>(across / pixels, 1);
  for (int64_t i = 0; i < images; i += some_images)
    for (int64_t p = 0; p < pixels; p += some_pixels)
      f([&](const Tensor& t) {
        const Tensor part = t.narrow(0, i, std::min(some_images, images - i));
        return pixels == 1 ? part : part.narrow(-1, p, std::min(some_pixels, pixels - p));
      });
}

struct Loss {
  int64_t reduction, ignore_index;
};

struct CrossEntropy : Function<CrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& target, const OptTensor& weight,
                        const Loss& loss) {
    ctx->set_materialize_grads(false);
    const auto dtype = acc_type(x.scalar_type());
    const Tensor rows = as_rows(x), targets = as_rows(target, rows);
    const OptTensor scale = weight ? OptTensor(weight->to(dtype)) : OptTensor();
    Tensor losses = at::empty(target.sizes(), x.options().dtype(dtype));  // no view: the caller may write to it
    const Tensor losses_of_rows = as_rows(losses, rows);
    each_part(rows, [&](const auto& part) {
      const Tensor log_p = at::log_softmax(part(rows), 1, dtype);
      part(losses_of_rows).copy_(at::nll_loss_nd(log_p, part(targets), scale, at::Reduction::None, loss.ignore_index));
    });
    Tensor total;
    if (loss.reduction == at::Reduction::Mean)
      total = weights_of_targets(target, weight, loss.ignore_index, dtype).sum();
    Keeper keeper;
    keeper.add(x);
    keeper.add(target, /*always_itself=*/true);
    keeper.add(value_or_undefined(weight), /*always_itself=*/true);
    keeper.add(total, /*always_itself=*/true);
    keeper.save(ctx);
    ctx->saved_data["reduction"] = loss.reduction;
    ctx->saved_data["ignore_index"] = loss.ignore_index;
    if (loss.reduction == at::Reduction::None) return losses.to(x.scalar_type());
    losses = losses.sum();
    return (total.defined() ? losses.div_(total) : losses).to(x.scalar_type());
  }

  // dx = c (softmax(x) - 1 at the target), where c is the loss's gradient times the target's weight.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const SavedTensors kept(ctx);
    const Loss loss{ctx->saved_data["reduction"].toInt(), ctx->saved_data["ignore_index"].toInt()};
    if (at::GradMode::is_enabled()) {
      result[0] = differentiable_gradients({kept[0]}, std::array<bool, 1>{true}, grad, [&](const auto& t) {
        return at::cross_entropy_loss(t[0], kept[1], optional(kept[2]), loss.reduction, loss.ignore_index, 0.0);
      })[0];
      return result;
    }
    const Tensor x = kept[0], target = kept[1], total = kept[3];
    const auto dtype = acc_type(x.scalar_type());
    Tensor factor = weights_of_targets(target, optional(kept[2]), loss.ignore_index, dtype).mul_(grad);
    if (total.defined()) factor.div_(total);
    const Tensor ignored = target.eq(loss.ignore_index);
    factor.masked_fill_(ignored, 0);  // where all are, the total is 0
    const Tensor dx = at::empty_like(x);
    const Tensor rows = as_rows(x), to = as_rows(dx);
    const Tensor classes = as_rows(target.masked_fill(ignored, 0), rows).unsqueeze(1);
    factor = as_rows(factor, rows).unsqueeze(1);
    const Tensor minus_one = at::full({}, -1, factor.options()).expand_as(classes);
    each_part(rows, [&](const auto& part) {
      Tensor p = at::softmax(part(rows), 1, dtype);
      p.scatter_add_(1, part(classes), part(minus_one));
      part(to).copy_(p.mul_(part(factor)));
    });
    result[0] = dx;
    return result;
  }
};

// Whether the input in place of its log_softmax takes no more memory: it may be a view of something larger.
bool small_enough(const Tensor& x) { return costs_nothing(x) || x.storage().nbytes() <= x.nbytes() + x.nbytes() / 4; }

Tensor run_cross_entropy(const Tensor& x, const Tensor& target, const OptTensor& weight, int64_t reduction,
                         int64_t ignore_index, double label_smoothing) {
  const OptTensor w = defined(weight);
  const auto fits = [&] {
    if (x.dim() < 2 || target.dim() != x.dim() - 1 || target.size(0) != x.size(0)) return false;
    return x.sizes().slice(2) == target.sizes().slice(1);
  };
  const bool ours = needs_grad(x) && plain(x) && x.numel() > 0 && fits() && target.scalar_type() == at::kLong &&
                    target.device() == x.device() && label_smoothing == 0 && reduction >= at::Reduction::None &&
                    reduction <= at::Reduction::Sum && as_rows(x).defined() &&
                    (!w || (plain(*w) && !w->requires_grad() && w->dim() == 1 && w->size(0) == x.size(1) &&
                            w->scalar_type() == x.scalar_type() && w->device() == x.device())) &&
                    small_enough(x);
  if (!ours) return at::cross_entropy_loss(x, target, weight, reduction, ignore_index, label_smoothing);
  return CrossEntropy::apply(x, target, w, Loss{reduction, ignore_index});
}

// Autocast runs it in float32: itself on the CPU's list and TorchScript's, both of its parts on CUDA's. The logits are
// kept as they came.
template <c10::DeviceType device>
Tensor autocast_cross_entropy(const Tensor& x, const Tensor& target, const OptTensor& weight, int64_t reduction,
                              int64_t ignore_index, double label_smoothing) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return run_cross_entropy(cast_for_autocast(at::kFloat, x, device, Recompute::shared), target,
                           cast_for_autocast(at::kFloat, weight, device), reduction, ignore_index, label_smoothing);
}

}  // namespace

void register_cross_entropy(torch::Library& m) {
  m.def(
      "cross_entropy_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100, "
      "float label_smoothing=0.0) -> Tensor",
      TORCH_FN(run_cross_entropy));
  m.impl("cross_entropy_loss", c10::DispatchKey::AutocastCPU, TORCH_FN(autocast_cross_entropy<c10::DeviceType::CPU>));
  m.impl("cross_entropy_loss", c10::DispatchKey::AutocastCUDA, TORCH_FN(autocast_cross_entropy<c10::DeviceType::CUDA>));
}

}  // namespace tsmem
