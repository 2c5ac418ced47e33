// Activations that keep one bit an element, or one tensor.
//
// relu, hardtanh, threshold, leaky_relu and hardsigmoid have a derivative of two values: a mask of one bit an element,
// in the order of memory, tells which. Where a later op keeps the output of relu or of leaky_relu in place (a
// convolution its input), that tells it too, and takes the mask's place. The others keep the input, or what it is made
// from; sigmoid and tanh, as PyTorch's, the output.
#include <ATen/autocast_mode.h>

#include <mutex>

#include "act_table.h"
#include "activation.h"
#include "common.h"
#include "function.h"
#include "known.h"
#include "raw_op.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const c10::OperatorHandle& act_mask_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_act_mask", "");
  return op;
}

std::tuple<Tensor, Tensor> act_mask(const Tensor& x, const Act& act) {
  static const auto op = act_mask_op().typed<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, double, double)>();
  return op.call(x, static_cast<int64_t>(act.kind), act.a, act.b);
}

Tensor act_mask_backward(const Tensor& grad, const Tensor& mask, const Act& act, at::IntArrayRef strides) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tsmem::_act_mask_backward", "")
          .typed<Tensor(const Tensor&, const Tensor&, int64_t, double, double, at::IntArrayRef, const OptTensor&)>();
  const OptTensor own = only_ours(grad) ? OptTensor(grad) : OptTensor();  // takes the result
  return op.call(grad, mask, static_cast<int64_t>(act.kind), act.a, act.b, strides, own);
}

// The strides of a new result of PyTorch's operator: x's, but those of a new tensor where dimensions of one element
// leave a choice (TensorIterator.cpp, fast_set_up; at::hardtanh makes its result like x). x is dense.
c10::DimVector strides_of_new(const Tensor& x, const Act& act) {
  if (act.kind == ActKind::hardtanh) return c10::DimVector(x.strides());
  if (x.is_contiguous()) return c10::contiguous_strides(x.sizes());
  if (x.is_contiguous(at::MemoryFormat::ChannelsLast))
    return c10::DimVector(c10::get_channels_last_strides_2d(x.sizes()));
  return c10::DimVector(x.strides());
}

// `made` from x by a kernel of ours or by PyTorch's operator, with the strides that the original's result has.
Tensor as_original(const Tensor& made, const Tensor& x, const Act& act, bool in_place, bool ours) {
  if (x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || x.layout() != at::kStrided) return made;
  if (in_place) return in_strides(made, x.strides());
  return ours && x.is_non_overlapping_and_dense() ? in_strides(made, strides_of_new(x, act)) : made;
}

using SmoothOp = RawOp<Tensor(const Tensor& x, const Act& act)>;
using SmoothBackwardOp = RawOp<Tensor(const Tensor& grad, const Tensor& x, const Act& act, const OptTensor& out)>;

const SmoothOp& smooth_op() {
  static const SmoothOp op("tsmem::_smooth_act");
  return op;
}

// Where our kernel is the faster one. float64 is PyTorch's, bit for bit: its functions are the C library's here too,
// one element at a time.
bool smooth_usable(const Tensor& x, const Act& act) {
  return info_of(act.kind).faster_here && x.scalar_type() != at::kDouble && x.is_non_overlapping_and_dense() &&
         !x.is_neg() && has_kernel(smooth_op().handle(), x);
}

void keep(AutogradContext* ctx, const Act& act, at::IntArrayRef strides) {
  ctx->set_materialize_grads(false);
  save_act(ctx, act);
  ctx->saved_data["strides"] = strides;
}

Tensor backward_of(AutogradContext* ctx, const Tensor& grad);

// Whether PyTorch's own keeps the output too: else it might be overwritten before backward.
bool output_serves(const Act& act, bool in_place) {
  return act.kind == ActKind::relu || (in_place && act.kind == ActKind::leaky_relu && act.a >= 0);
}

// The gradient from the output. own: memory that may take it, or undefined.
Tensor backward_from_output(const Tensor& grad, const Tensor& y, const Act& act, Tensor own) {
  if (act.kind == ActKind::relu)
    return own.defined() ? at::threshold_backward_out(own, grad, y, 0) : at::threshold_backward(grad, y, 0);
  return own.defined() ? at::leaky_relu_backward_out(own, grad, y, act.a, /*self_is_result=*/true)
                       : at::leaky_relu_backward(grad, y, act.a, /*self_is_result=*/true);
}

// The backward is linear in the gradient, and so its own derivative: second derivatives work.
struct ActBackward : Function<ActBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& mask, const Act& act,
                        at::IntArrayRef strides) {
    keep(ctx, act, strides);
    ctx->save_for_backward({mask});
    return act_mask_backward(grad, mask, act, strides);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return {backward_of(ctx, grads[0]), Tensor(), Tensor(), Tensor()};
  }
};

Tensor backward_of(AutogradContext* ctx, const Tensor& grad) {
  if (!grad.defined()) return {};
  const Act act = saved_act(ctx);
  const Tensor mask = ctx->get_saved_variables()[0];
  if (ctx->saved_data.count("is_output"))
    return backward_from_output(grad, mask.detach(), act,
                                !at::GradMode::is_enabled() && only_ours(grad) ? grad : Tensor());
  const auto strides = ctx->saved_data["strides"].toIntVector();
  return needs_grad(grad) ? ActBackward::apply(grad, mask, act, at::IntArrayRef(strides))
                          : act_mask_backward(grad, mask, act, strides);
}

struct MaskedAct : Function<MaskedAct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Act& act) {
    auto [y, mask] = act_mask(x, act);
    keep(ctx, act, y.strides());
    ctx->save_for_backward({mask});
    return y;
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return {backward_of(ctx, grads[0]), Tensor()};
  }
  // y, the output, is kept by somebody else now: it takes the mask's place, but while the node is in its backward.
  static void keep_output(const Tensor& y) {
    struct Node : torch::autograd::CppNode<MaskedAct> {
      using torch::autograd::Node::mutex_;  // that of its backward
    };
    if (y._version() != 0 || hooks_active()) return;
    auto& node = static_cast<Node&>(*y.grad_fn());
    const std::unique_lock lock(node.mutex_, std::try_to_lock);
    if (!lock) return;
    node.ctx_.saved_data["is_output"] = true;
    node.ctx_.save_for_backward({y});
    node.save_variables_to_ctx();
  }
};

// Any activation: by our kernel where that is the faster one.
Tensor smooth_act(const Tensor& x, const Act& act) {
  if (!smooth_usable(x, act)) return aten_act(x, act);
  return smooth_op()(x, act);
}

Tensor smooth_backward(const Tensor& grad, const Tensor& x, const Act& act) {
  const bool reuse = only_ours(grad);
  Tensor own = reuse ? grad : Tensor();  // takes the result
  // PyTorch's formulas where they are to be differentiated again.
  if (!at::GradMode::is_enabled() && smooth_usable(x, act) && grad.strides() == x.strides() && !grad.is_neg() &&
      grad.scalar_type() == x.scalar_type()) {
    static const SmoothBackwardOp op("tsmem::_smooth_act_backward");
    return op(grad, x, act, optional(own));
  }
  // ATen's derivatives of these two have no derivative; the same formulas do, of differentiable operators
  // (derivatives.yaml: infinitely_differentiable_silu_backward, …_mish_backward).
  if (at::GradMode::is_enabled() && act.kind == ActKind::silu) {
    const Tensor s = x.sigmoid();
    return grad * s * (1 + x * (1 - s));
  }
  if (at::GradMode::is_enabled() && act.kind == ActKind::mish) {
    const Tensor t = at::softplus(x).tanh();
    return grad * (t + x * x.sigmoid() * (1 - t * t));
  }
  return aten_act_backward(grad, x, act, own);
}

bool smooth(ActKind kind) { return info_of(kind).saves == ActSaves::input; }

// The derivative from an input that may be recomputed.
struct SmoothAct : Function<SmoothAct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Act& act) {
    ctx->set_materialize_grads(false);
    Keeper keeper;
    keeper.add(x);
    keeper.save(ctx);
    save_act(ctx, act);
    return smooth_act(x, act);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    const SavedTensors kept(ctx);
    std::vector<Tensor> g{smooth_backward(grads[0], kept[0], saved_act(ctx))};
    return {g[0], Tensor()};
  }
};

}  // namespace

Tensor act(const Tensor& self, c10::string_view name, at::ArrayRef<double> args, int64_t recompute, bool in_place) {
  const Act act = parse_act(name, args);
  // Rewritten code has these for sigmoid_ and tanh_ alone: of integers they would give float32, and raise.
  if (!self.is_floating_point() && !self.is_complex()) {
    if (act.kind == ActKind::sigmoid) return self.clone().sigmoid_();
    if (act.kind == ActKind::tanh) return self.clone().tanh_();
  }
  if (act.kind == ActKind::identity) return self.clone();  // the schema promises a tensor that aliases nothing
  const bool fits = self.numel() != 0 && plain(self), grad = needs_grad(self);
  if (fits && !in_place && autocast_casts(self, act)) {
    const auto device = self.device().type();
    c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return tsmem::act(cast_for_autocast(at::kFloat, self, device, recompute), name, args, recompute, in_place);
  }
  const bool smooth_ours =
      fits && RecomputeArgument(recompute).offered() && smooth(act.kind) && !autocast_casts(self, act);
  const bool masked = fits && grad && one_bit(act.kind) && has_kernel(act_mask_op(), self);
  const Tensor made = masked         ? MaskedAct::apply(self, act)
                      : !smooth_ours ? aten_act(self, act)
                      : grad         ? SmoothAct::apply(self, act)
                                     : smooth_act(self, act);
  if (masked && output_serves(act, in_place))
    update_known(made.grad_fn(), [](OutputRecord& known) { known.when_kept = MaskedAct::keep_output; });
  const Tensor out = as_original(made, self, act, in_place, masked || smooth_ours);
  if (grad && (masked || smooth_ours))
    offer(
        out, {self}, [act](std::vector<Tensor>& from, const std::vector<bool>&) { return smooth_act(from[0], act); },
        recompute, Pieces::no, {}, Rows::own);
  return out;
}

void register_act(torch::Library& m) {
  m.def("act(Tensor self, str act, float[] act_args, int recompute=0, bool act_in_place=False) -> Tensor",
        TORCH_FN(act));
  m.def("_act_mask(Tensor x, int kind, float a, float b) -> (Tensor, Tensor)");
  m.def(
      "_act_mask_backward(Tensor grad, Tensor mask, int kind, float a, float b, int[] strides, "
      "Tensor(a!)? out=None) -> Tensor");
  m.def("_smooth_act(Tensor x, int kind, float a, float b, float c) -> Tensor");
  m.def("_smooth_act_backward(Tensor grad, Tensor x, int kind, float a, float b, float c, Tensor(a!)? out) -> Tensor");
}

}  // namespace tsmem
