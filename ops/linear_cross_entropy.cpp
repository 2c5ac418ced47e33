// A last layer and its loss: cross_entropy_loss(linear(x)) in blocks of rows. The logits, which for a vocabulary are
// the largest tensor of a step, are never there as a whole: forward makes those of a block, takes what the block adds
// to the gradients from them, and drops them. What is kept for backward is the gradients of x, the weight and the bias
// but for the loss's own gradient, a number, by which backward multiplies them. Nothing is computed twice. Under
// create_graph the operands are read in their place, where it cost nothing to keep them; else it is refused.
//
// Source of the idea: Hsu et al., Liger Kernel (arXiv:2410.10989). The loss and its derivative are those of
// cross_entropy.cpp; the 16-bit types are computed as there and add up in float32.
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/graph_task.h>

#include "cross_entropy.h"
#include "function.h"
#include "linear.h"
#include "norm_ops.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of a block: what products of matrices need to run at their speed.
constexpr int64_t kFewestRows = 256;
constexpr int64_t kFewestRowsOnDevice = 1024;

// What a model does with the logits before it gives them to the loss.
struct Between {
  int64_t slice_dim;
  std::optional<int64_t> start, end;
  int64_t step;
  c10::string_view arrange;             // "", "view", "reshape", "flatten" or "transpose"
  at::OptionalIntArrayRef sizes;        // of a view or reshape
  int64_t dim0, dim1;                   // of flatten and transpose
  std::optional<at::ScalarType> dtype;  // that they are cast to

  bool slices() const { return start.value_or(0) != 0 || end.value_or(INT64_MAX) != INT64_MAX || step != 1; }
  Tensor slice(const Tensor& t) const { return slices() ? t.slice(slice_dim, start, end, step) : t; }
};

struct Head {
  Tensor input, weight;
  OptTensor bias;
  Tensor target;
  OptTensor class_weight;
  int64_t reduction, ignore_index;
  double label_smoothing;
};

// One operator after the other.
Tensor composed_loss(const Head& h, const Between& between) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("tsmem::linear", "")
                                 .typed<Tensor(const Tensor&, const Tensor&, const OptTensor&, int64_t)>();
  static const auto loss =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tsmem::cross_entropy_loss", "")
          .typed<Tensor(const Tensor&, const Tensor&, const OptTensor&, int64_t, int64_t, double)>();
  Tensor logits = linear.call(h.input, h.weight, h.bias, 0);
  if (between.dtype) logits = logits.to(*between.dtype);
  logits = between.slice(logits);
  if (between.arrange == "view") logits = logits.view(between.sizes.value());
  if (between.arrange == "reshape") logits = logits.reshape(between.sizes.value());
  if (between.arrange == "flatten") logits = logits.flatten(between.dim0, between.dim1);
  if (between.arrange == "transpose") logits = logits.transpose(between.dim0, between.dim1);
  return loss.call(logits, h.target, h.class_weight, h.reduction, h.ignore_index, h.label_smoothing);
}

// Whether the loss of the logits of x, arranged, is that of x's rows in their order, each with a target of its own.
bool are_rows(const Tensor& x, int64_t classes, const Tensor& target, const Between& between) {
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const auto dim = [&](int64_t d) { return c10::maybe_wrap_dim(d, x.dim(), /*wrap_scalar=*/false); };
  const auto in_range = [&](int64_t d) { return d >= -x.dim() && d < x.dim(); };
  const auto is = [](int64_t size, int64_t wanted) { return size == wanted || size == -1; };
  if (between.arrange == "transpose") {  // [N, T, classes] to [N, classes, T]
    if (x.dim() != 3 || !in_range(between.dim0) || !in_range(between.dim1)) return false;
    return std::min(dim(between.dim0), dim(between.dim1)) == 1 && std::max(dim(between.dim0), dim(between.dim1)) == 2 &&
           target.sizes() == x.sizes().slice(0, 2);
  }
  if (target.dim() != 1 || target.size(0) != rows) return false;
  if (between.arrange.empty()) return x.dim() == 2;
  if (between.arrange == "flatten")
    return in_range(between.dim0) && in_range(between.dim1) && dim(between.dim0) == 0 &&
           dim(between.dim1) == x.dim() - 2;
  const auto sizes = between.sizes.value();
  if (sizes.size() != 2 || !is(sizes[0], rows) || !is(sizes[1], classes)) return false;
  return sizes[0] != -1 || sizes[1] != -1;
}

// Whether view() takes a slice of the logits of x as rows: these must follow each other in memory.
bool viewable(const Tensor& x, const Tensor& part, const Between& between) {
  const int64_t dim = c10::maybe_wrap_dim(between.slice_dim, x.dim(), /*wrap_scalar=*/false);
  return part.size(dim) == x.size(dim) || (between.step == 1 && c10::multiply_integers(x.sizes().slice(0, dim)) == 1);
}

// Bytes of the gradients that are kept, which are those of x and of the weight, in float32 for 16 bits.
int64_t kept_bytes(const Tensor& x, const Tensor& weight) {
  return (x.requires_grad() ? static_cast<int64_t>(x.nbytes()) : 0) +
         (weight.requires_grad() ? weight.numel() * std::max<int64_t>(weight.element_size(), 4) : 0);
}

// Whether all of it is of the usual kind, and the gradients take less than the logits would.
bool in_blocks(const Head& h, const Between& between, at::ScalarType loss_type) {
  const Tensor &x = h.input, &weight = h.weight, &target = h.target;
  const bool usual = needs_grad(x, weight, value_or_undefined(h.bias)) && plain(x) && plain(weight) && x.dim() >= 2 &&
                     weight.dim() == 2 && x.size(-1) == weight.size(1) && x.numel() > 0 && weight.numel() > 0 &&
                     x.scalar_type() == weight.scalar_type() && x.device() == weight.device() &&
                     (!h.bias || (plain(*h.bias) && h.bias->dim() == 1 && h.bias->size(0) == weight.size(0) &&
                                  h.bias->scalar_type() == x.scalar_type() && h.bias->device() == x.device()));
  // A cast to float32 of what is no wider: the loss is computed in it anyway.
  if (loss_type != x.scalar_type() && (loss_type != at::kFloat || acc_type(x.scalar_type()) != at::kFloat))
    return false;
  if (!usual || h.label_smoothing != 0 || target.scalar_type() != at::kLong || target.device() != x.device() ||
      (h.reduction != at::Reduction::Mean && h.reduction != at::Reduction::Sum) || hooks_active())
    return false;
  if (const OptTensor& w = h.class_weight;
      w && (!plain(*w) || w->requires_grad() || w->dim() != 1 || w->size(0) != weight.size(0) ||
            w->device() != x.device() || w->scalar_type() != loss_type))
    return false;
  if (between.slices() && (between.slice_dim < -x.dim() || between.slice_dim >= x.dim() ||
                           c10::maybe_wrap_dim(between.slice_dim, x.dim()) == x.dim() - 1))
    return false;  // a slice of the classes
  const Tensor part = between.slice(x);
  if (between.arrange == "view" && between.slices() && !viewable(x, part, between)) return false;
  const int64_t classes = weight.size(0);
  return part.numel() > 0 && are_rows(part, classes, target, between) &&
         kept_bytes(part, weight) < part.numel() / part.size(-1) * classes * static_cast<int64_t>(part.element_size());
}

int64_t rows_of_a_block(const Tensor& rows, int64_t classes) {
  const int64_t fewest = rows.is_cpu() ? kFewestRows : kFewestRowsOnDevice;
  // Logits of about the input's size.
  const int64_t some = std::clamp(rows.numel() / classes, std::min(fewest, rows.size(0)), rows.size(0));
  const int64_t blocks = (rows.size(0) + some - 1) / some;
  return (rows.size(0) + blocks - 1) / blocks;
}

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  // input: [*, features]; target: one for each row.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight, const OptTensor& bias,
                        const Tensor& target, const OptTensor& class_weight, int64_t reduction, int64_t ignore_index,
                        at::ScalarType loss_type) {
    ctx->set_materialize_grads(false);
    const auto dtype = acc_type(input.scalar_type());
    const Tensor rows = input.reshape({-1, input.size(-1)}), targets = target.reshape({-1});
    const OptTensor scale = class_weight ? OptTensor(class_weight->to(dtype)) : OptTensor();
    const Tensor ignored = targets.eq(ignore_index);
    const Tensor classes = targets.masked_fill(ignored, 0);
    Tensor factors = weights_of_targets(targets, scale, ignore_index, dtype);
    // The gradients that are kept are of the loss times `total`, which keeps 16 bits in their range: a sum over rows,
    // and in units of the largest weight.
    Tensor total, weights_sum;
    if (reduction == at::Reduction::Mean) {
      weights_sum = factors.sum();
      // Without a weight rows get no number, and those that are ignored zeros.
      factors.masked_fill_(weights_sum.eq(0).logical_and(ignored.logical_not()), NAN);
    }
    if (scale) {
      Tensor unit = factors.abs().amax();
      unit = at::where(unit.isfinite().logical_and(unit > 0), unit, at::ones({}, unit.options()));
      factors.div_(unit);
      total = weights_sum.defined() ? weights_sum / unit : unit.reciprocal();
    } else {
      total = weights_sum;
    }
    if (weights_sum.defined()) total = total.masked_fill(weights_sum.eq(0), 1);

    Tensor dx, dw, db, loss = at::zeros({}, rows.options().dtype(dtype));
    if (input.requires_grad()) dx = at::empty(rows.sizes(), rows.options());
    if (weight.requires_grad()) dw = at::zeros(weight.sizes(), weight.options().dtype(dtype));
    if (bias && bias->requires_grad()) db = at::zeros(bias->sizes(), bias->options().dtype(dtype));
    const int64_t step = rows_of_a_block(rows, weight.size(0));
    for (int64_t first = 0; first < rows.size(0); first += step) {
      const auto part = [&](const Tensor& t) { return t.narrow(0, first, std::min(step, t.size(0) - first)); };
      const Tensor x = part(rows);
      const Tensor logits = at::linear(x, weight, bias);
      loss.add_(
          at::nll_loss_nd(at::log_softmax(logits, 1, dtype), part(targets), scale, at::Reduction::Sum, ignore_index));
      Tensor p = at::softmax(logits, 1, dtype);  // exp of the log_softmax takes ten times as long where it underflows
      const Tensor index = part(classes).unsqueeze(1);
      p.scatter_add_(1, index, at::full({}, -1, p.options()).expand_as(index));
      p.mul_(part(factors).unsqueeze(1));
      if (db.defined()) db.add_(p.sum(0));
      const Tensor g = p.to(input.scalar_type());
      if (dx.defined()) part(dx).copy_(g.mm(weight));
      if (!dw.defined()) continue;
      // A sum over rows may leave float16's range; the loss's gradient will bring it back.
      if (dtype == input.scalar_type())
        dw.addmm_(g.t(), x);
      else if (input.scalar_type() != at::kHalf)
        dw.add_(g.t().mm(x));
      else if (input.is_cuda())
        dw.add_(at::mm(g.t(), x, dtype));
      else
        dw.addmm_(p.t(), x.to(dtype));
    }

    Keeper keeper;
    keeper.add(dx.defined() ? dx.view(input.sizes()) : dx, /*always_itself=*/true);
    keeper.add(dw, /*always_itself=*/true);
    keeper.add(db, /*always_itself=*/true);
    if (weights_sum.defined()) loss.div_(weights_sum);
    keeper.add(total, /*always_itself=*/true);
    // For second derivatives, where it costs nothing: a parameter is there anyway.
    const auto there = [](const Tensor& t) { return !t.defined() || costs_nothing(t) || t.is_leaf(); };
    const Tensor b = value_or_undefined(bias);
    const bool all = costs_nothing(input) && there(weight) && there(b);
    for (const Tensor& t : {input, weight, b}) keeper.add(all ? t : Tensor());
    for (const Tensor& t : {target, value_or_undefined(class_weight)})
      keeper.add(all ? t : Tensor(), /*always_itself=*/true);
    keeper.add(ignored, /*always_itself=*/true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["dtype"] = weight.scalar_type();
    data["loss_type"] = loss_type;
    data["reduction"] = reduction;
    data["ignore_index"] = ignore_index;
    return loss.to(loss_type);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(8);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const SavedTensors kept(ctx);
    if (const Tensor target = kept[7]; at::GradMode::is_enabled() && target.defined()) {
      auto& data = ctx->saved_data;
      std::array<bool, 3> want;
      for (int i : {0, 1, 2}) want[i] = kept[i].defined() && ctx->needs_input_grad(i);
      const auto g = differentiable_gradients({kept[4], kept[5], kept[6]}, want, grad, [&](const auto& t) {
        const Tensor logits = at::linear(t[0].reshape({-1, t[0].size(-1)}), t[1], optional(t[2]));
        return at::cross_entropy_loss(logits.to(data["loss_type"].toScalarType()), target.reshape({-1}),
                                      optional(kept[8]), data["reduction"].toInt(), data["ignore_index"].toInt(), 0.0);
      });
      std::copy(g.begin(), g.end(), result.begin());
      return result;
    }
    {
      at::NoGradGuard no_grad;
      const auto dtype = ctx->saved_data["dtype"].toScalarType(), wide = acc_type(dtype);
      Tensor factor = grad.to(wide);
      if (const Tensor total = kept[3]; total.defined()) factor = factor.div(total);
      // Rows that are ignored have zeros for a gradient, whatever the loss has: it may be infinite, or no number.
      const Tensor ignored = kept[9];
      factor = factor.masked_fill(ignored.all(), 0);
      const bool last = last_reader();
      for (size_t i = 0; i < 3; ++i) {
        const Tensor g = kept[i];
        if (!g.defined() || !ctx->needs_input_grad(i)) continue;
        const bool ours = last || g.scalar_type() != wide;  // nobody needs what to(wide) gives again
        result[i] = (ours ? g.to(wide).mul_(factor) : g.mul(factor)).to(dtype);
        if (i > 0) continue;
        auto rows = g.sizes().vec();
        rows.back() = 1;
        result[0].masked_fill_(ignored.view(rows), 0);
      }
    }
    // x and the weight, on which they depend, are not there: something stands for each that has its place in the graph.
    std::vector<Tensor> made(result.begin(), result.begin() + 3), inputs = {grad};
    if (at::GradMode::is_enabled())
      for (const torch::autograd::Edge& edge : torch::autograd::get_current_node()->next_edges()) {
        if (!edge.is_valid()) continue;
        inputs.push_back(at::zeros({}, grad.options()));
        torch::autograd::impl::set_gradient_edge(inputs.back(), edge);
      }
    made = refuse_double_backward(std::move(made), "linear_cross_entropy", inputs);
    std::copy(made.begin(), made.end(), result.begin());
    return result;
  }
};

Tensor apply_blocks(const Head& h, const Between& between, at::ScalarType loss_type) {
  return LinearCrossEntropy::apply(between.slice(h.input), h.weight, h.bias, h.target, h.class_weight, h.reduction,
                                   h.ignore_index, loss_type);
}

Tensor run_linear_cross_entropy(const Tensor& input, const Tensor& weight, const OptTensor& bias, const Tensor& target,
                                const OptTensor& class_weight, int64_t reduction, int64_t ignore_index,
                                double label_smoothing, int64_t slice_dim, std::optional<int64_t> slice_start,
                                std::optional<int64_t> slice_end, int64_t slice_step, c10::string_view arrange,
                                at::OptionalIntArrayRef sizes, int64_t dim0, int64_t dim1,
                                std::optional<at::ScalarType> dtype) {
  const Head h{input, weight, defined(bias), target, defined(class_weight), reduction, ignore_index, label_smoothing};
  const Between between{slice_dim, slice_start, slice_end, slice_step, arrange, sizes, dim0, dim1, dtype};
  const auto loss_type = dtype.value_or(input.scalar_type());
  return in_blocks(h, between, loss_type) ? apply_blocks(h, between, loss_type) : composed_loss(h, between);
}

// The layer runs in half size and its loss in float32, as each does by itself.
template <c10::DeviceType device>
Tensor autocast_loss(const Tensor& input, const Tensor& weight, const OptTensor& bias, const Tensor& target,
                     const OptTensor& class_weight, int64_t reduction, int64_t ignore_index, double label_smoothing,
                     int64_t slice_dim, std::optional<int64_t> slice_start, std::optional<int64_t> slice_end,
                     int64_t slice_step, c10::string_view arrange, at::OptionalIntArrayRef sizes, int64_t dim0,
                     int64_t dim1, std::optional<at::ScalarType> dtype) {
  const Between between{slice_dim, slice_start, slice_end, slice_step, arrange, sizes, dim0, dim1, dtype};
  {
    c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto to = at::autocast::get_lower_precision_fp_from_device_type(device);
    const Head h{at::autocast::cached_cast(to, input, device),
                 at::autocast::cached_cast(to, weight, device),
                 at::autocast::cached_cast(to, defined(bias), device),
                 target,
                 at::autocast::cached_cast(at::kFloat, defined(class_weight), device),
                 reduction,
                 ignore_index,
                 label_smoothing};
    if (h.input.scalar_type() == to && dtype.value_or(at::kFloat) == at::kFloat && in_blocks(h, between, at::kFloat))
      return apply_blocks(h, between, at::kFloat);
  }
  return composed_loss({input, weight, bias, target, class_weight, reduction, ignore_index, label_smoothing}, between);
}

std::vector<int64_t> output_size(const Tensor& input, const Tensor& weight) {
  auto sizes = input.sizes().vec();
  TORCH_CHECK(!sizes.empty() && weight.dim() >= 1,
              "a linear layer needs an input and a weight of one dimension or more");
  if (weight.dim() == 1)
    sizes.pop_back();
  else
    sizes.back() = weight.size(0);
  return sizes;
}

int64_t output_size_at(const Tensor& input, const Tensor& weight, int64_t dim) {
  const auto sizes = output_size(input, weight);
  return sizes[c10::maybe_wrap_dim(dim, static_cast<int64_t>(sizes.size()))];
}

}  // namespace

void register_linear_cross_entropy(torch::Library& m) {
  m.def(
      "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight=None, int "
      "reduction=1, int ignore_index=-100, float label_smoothing=0.0, int slice_dim=0, int? slice_start=None, int? "
      "slice_end=None, int slice_step=1, str arrange=\"\", int[]? sizes=None, int dim0=0, int dim1=0, "
      "ScalarType? dtype=None) -> Tensor",
      TORCH_FN(run_linear_cross_entropy));
  m.impl("linear_cross_entropy", c10::DispatchKey::AutocastCPU, TORCH_FN(autocast_loss<c10::DeviceType::CPU>));
  m.impl("linear_cross_entropy", c10::DispatchKey::AutocastCUDA, TORCH_FN(autocast_loss<c10::DeviceType::CUDA>));
  m.def("linear_output_size(Tensor input, Tensor weight) -> int[]", TORCH_FN(output_size));
  m.def("linear_output_size.dim(Tensor input, Tensor weight, int dim) -> int", TORCH_FN(output_size_at));
}

}  // namespace tsmem
