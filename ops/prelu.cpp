// prelu: keeps its input, or what that is made from, and the slopes. Its output can be recomputed. Backward is one pass
// over input and gradient, which sums the slopes' gradient as it goes: PyTorch's writes a product of the input's size
// for it. Formulas: ATen/native/cpu/Activation.cpp, prelu_kernel and prelu_backward_kernel.
#include <ATen/autocast_mode.h>

#include "function.h"
#include "norm_ops.h"
#include "raw_op.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x: dense in one format; the result has its strides, or is in `out`, which may be x.
using PreluOp = RawOp<Tensor(const Tensor& x, const Tensor& weight, const OptTensor& out)>;
// The gradients of x and of the weight, as asked for by `want`. x and grad: dense in one format. out: where the first
// goes, which may be grad.
using PreluBackwardOp = RawOp<std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                         std::array<bool, 2> want, const OptTensor& out)>;

const PreluOp& prelu_op() {
  static const PreluOp op("tsmem::_prelu");
  return op;
}

bool has_format(const Tensor& x) { return x.is_contiguous(x.suggest_memory_format()); }

// Whether the kernels take these: one slope, or one a channel.
bool prelu_usable(const Tensor& x, const Tensor& weight) {
  return has_kernel(prelu_op().handle(), x) && has_format(x) && x.numel() > 0 && !x.is_neg() &&
         weight.scalar_type() == x.scalar_type() && weight.device() == x.device() &&
         (weight.numel() == 1 || (x.dim() >= 2 && weight.numel() == x.size(1)));
}

// The weight as a tensor that broadcasts over x, as at::prelu has it.
Tensor over(const Tensor& weight, const Tensor& x) {
  if (x.dim() == weight.dim()) return weight;
  std::vector<int64_t> sizes(x.dim(), 1);
  if (x.dim() > 1) sizes[1] = weight.numel();
  return weight.reshape(sizes);
}

Tensor again(std::vector<Tensor>& from, const std::vector<bool>& spare) {
  if (!prelu_usable(from[0], from[1])) return at::prelu(from[0], from[1]);
  return prelu_op()(from[0], from[1], spare[0] ? optional(from[0]) : OptTensor());
}

struct Prelu : Function<Prelu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(x);
    keeper.add(weight);
    keeper.save(ctx);
    return at::prelu(x, weight);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(2);
    const SavedTensors kept(ctx);
    const std::array<bool, 2> want{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    std::vector<Tensor> g(2);
    const Tensor x = kept[0], weight = kept[1];
    if (!at::GradMode::is_enabled() && prelu_usable(x, weight) && grad.scalar_type() == x.scalar_type() &&
        !grad.is_neg()) {
      const Tensor dense = grad.contiguous(x.suggest_memory_format());
      const bool spare = !dense.is_same(grad) || only_ours(grad);
      static const PreluBackwardOp op("tsmem::_prelu_backward");
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(g[0], g[1]) = op(dense, x, weight, want, spare ? optional(dense) : OptTensor());
      return g;
    }
    // PyTorch's, which can be differentiated again.
    const Tensor broadcast = over(weight, x);
    const auto [of_x, of_weight] = at::_prelu_kernel_backward(grad, x, broadcast);
    if (want[0]) g[0] = of_x;
    if (want[1]) g[1] = of_weight.sum_to_size(broadcast.sizes()).view(weight.sizes());
    return g;
  }
};

Tensor run_prelu(const Tensor& self, const Tensor& weight, int64_t recompute) {
  const bool ours = needs_grad(self, weight) && plain(self) && plain(weight) && self.numel() > 0 &&
                    self.scalar_type() == weight.scalar_type() && self.device() == weight.device() &&
                    weight.dim() <= 1 && (weight.numel() == 1 || (self.dim() >= 2 && weight.numel() == self.size(1)));
  if (!ours) return at::prelu(self, weight);
  const Tensor out = Prelu::apply(self, weight);
  offer(out, {self, weight}, again, recompute);
  return out;
}

// On the list of operators that run in half precision, eager mode's and TorchScript's.
template <c10::DeviceType device>
Tensor autocast_prelu(const Tensor& self, const Tensor& weight, int64_t recompute) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto to = at::autocast::get_lower_precision_fp_from_device_type(device);
  return run_prelu(cast_for_autocast(to, self, device, recompute), cast_for_autocast(to, weight, device), recompute);
}

}  // namespace

void register_prelu(torch::Library& m) {
  m.def("prelu(Tensor self, Tensor weight, int recompute=0) -> Tensor", TORCH_FN(run_prelu));
  m.def("_prelu(Tensor x, Tensor weight, Tensor(a!)? out) -> Tensor");
  m.def("_prelu_backward(Tensor grad, Tensor x, Tensor weight, bool[2] want, Tensor(a!)? out) -> (Tensor, Tensor)");
  m.impl("prelu", c10::DispatchKey::AutocastCPU, TORCH_FN(autocast_prelu<c10::DeviceType::CPU>));
  m.impl("prelu", c10::DispatchKey::AutocastCUDA, TORCH_FN(autocast_prelu<c10::DeviceType::CUDA>));
}

}  // namespace tsmem
