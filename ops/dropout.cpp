// Dropouts that keep a bit an element, or less.
//
// On the CPU, where a draw takes as long as some twenty products, that is the noise's bits. On CUDA backward draws the
// same noise again from a copy of the generator's state, which is a seed and a counter (Philox), read and set without
// waiting for the device.
//
// The noise is PyTorch's: as many draws, in the same order, and the generator is left in the same state. Without
// training and on empty tensors PyTorch's ops draw nothing, and are called as they are; with p 0 or 1 they draw nothing
// either, but TorchScript's own derivative does (aten::native_dropout): `draws` tells which one is replaced.
//
// CUDA's plain dropout has a kernel of its own (cuda/dropout.h), which computes an element's noise from a seed and a
// counter that lie on the device: so it can be captured in a CUDA graph too, whose replays move the counter. For the
// other dropouts PyTorch's ops are called while one is captured.
#include <array>
#include <atomic>

#include "function.h"
#include "generator.h"
#include "pack.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Kind : int64_t { plain, feature, alpha, feature_alpha };

bool per_feature(Kind kind) { return kind == Kind::feature || kind == Kind::feature_alpha; }
bool is_alpha(Kind kind) { return kind == Kind::alpha || kind == Kind::feature_alpha; }

// What dropout multiplies with, and adds. Zeros and ones are drawn in place into `noise`.
struct Affine {
  Tensor factor, shift;
};
Affine scaled(Tensor noise, Kind kind, double p, bool with_shift) {
  if (!is_alpha(kind)) return {noise.div_(1 - p), {}};
  constexpr double alpha = 1.7580993408473766;  // SELU's negative saturation, of Klambauer et al., 2017
  const double a = 1 / std::sqrt((alpha * alpha * p + 1) * (1 - p));
  Tensor shift = with_shift ? noise.add(-1).mul_(alpha * a).add_(alpha * a * p) : Tensor();
  return {noise.mul_(a), shift};
}

// What noise is made again from.
struct Noise {
  Tensor from;  // its bits; on CUDA the generator's state
  double p;
  Kind kind;
  std::vector<int64_t> sizes, strides;
};

// Zeros, with probability p, and ones as at::bernoulli_ draws them. On the CPU the draws don't depend on the dtype.
Tensor draw(Noise& n, const Tensor& input) {
  const at::TensorOptions options = input.is_cuda() ? input.options() : input.options().dtype(at::kBool);
  Tensor noise;
  if (per_feature(n.kind)) {
    std::vector<int64_t> sizes(input.dim(), 1);
    sizes[0] = input.size(0);
    sizes[1] = input.size(1);
    noise = at::empty(sizes, options);
  } else {
    noise = at::empty_like(input, options);
  }
  n.sizes = noise.sizes().vec();
  n.strides = noise.strides().vec();
  if (input.is_cuda()) {
    n.from = draw_by_copy(noise, [&](const at::Generator& own) { noise.bernoulli_(1 - n.p, own); });
    return noise;
  }
  n.from = pack(noise.bernoulli_(1 - n.p), 1);
  return unpack_positive(n.from, n.sizes, n.strides, input.options());  // faster than a cast
}

Tensor draw_again(const Noise& n, const at::TensorOptions& options) {
  if (options.device().is_cuda())
    return at::empty_strided(n.sizes, n.strides, options).bernoulli_(1 - n.p, generator_at(n.from, options.device()));
  return unpack_positive(n.from, n.sizes, n.strides, options);
}

// t * factor: in the factor's memory, which nobody else holds, where that makes the same tensor.
Tensor scaled_by(const Tensor& t, const Tensor& factor) {
  const bool same = !at::GradMode::is_enabled() && t.sizes() == factor.sizes() && t.strides() == factor.strides() &&
                    t.scalar_type() == factor.scalar_type();
  return same ? Tensor(factor).mul_(t) : t * factor;
}

Tensor with_noise(const Tensor& input, const Affine& affine) {
  Tensor out = scaled_by(input, affine.factor);
  return affine.shift.defined() ? out.add_(affine.shift) : out;
}

struct Dropout : Function<Dropout> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, double p, Kind kind, Noise* used) {
    ctx->set_materialize_grads(false);
    *used = {{}, p, kind, {}, {}};
    const Tensor noise = draw(*used, input);
    ctx->save_for_backward({used->from});
    auto& data = ctx->saved_data;
    data["p"] = p;
    data["kind"] = static_cast<int64_t>(kind);
    data["sizes"] = used->sizes;
    data["strides"] = used->strides;
    return with_noise(input, scaled(noise, kind, p, true));
  }

  // Made of ATen calls on the gradient: second derivatives work.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(4);
    auto& data = ctx->saved_data;
    const Noise noise{ctx->get_saved_variables()[0], data["p"].toDouble(), static_cast<Kind>(data["kind"].toInt()),
                      data["sizes"].toIntVector(), data["strides"].toIntVector()};
    Tensor factor;
    {
      at::NoGradGuard no_grad;
      factor = scaled(draw_again(noise, grad.options()), noise.kind, noise.p, false).factor;
    }
    return {scaled_by(grad, factor), Tensor(), Tensor(), Tensor()};
  }
};

// CUDA's plain dropout: what its noise is computed from again, where it is needed.
struct Fused {
  Tensor state;  // seed and counter, on the device
  double p;
  int64_t group;  // elements that a thread draws together
  std::vector<int64_t> strides;
};

const c10::OperatorHandle& fused_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_fused_dropout", "");
  return op;
}

// Whether PyTorch's kernel on x's device draws as ours does: tried once a device, and not while a graph is captured.
bool draws_as_pytorch(const Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_draws_as_pytorch", "").typed<bool(const Tensor&)>();
  if (!x.is_cuda()) return true;  // emulated (tests/cuda)
  enum { unknown, same, other };
  static std::array<std::atomic<int>, 256> found{};
  std::atomic<int>& here = found.at(static_cast<size_t>(x.get_device()));
  if (here == unknown) {
    if (graph_offset(x) >= 0) return false;
    at::NoGradGuard no_grad;
    here = op.call(x) ? same : other;
    if (here == other)
      TORCH_WARN(
          "tsmem: this PyTorch's dropout draws in another order than those that tsmem knows: its own runs, which ",
          "keeps a mask of a byte an element.");
  }
  return here == same;
}

bool fits_fused(const Tensor& x) {
  return !x.is_meta() && !x.key_set().has(c10::DispatchKey::Python) && has_kernel(fused_op(), x) &&
         x.is_non_overlapping_and_dense() && draws_as_pytorch(x);
}

// x times the noise that was drawn, scaled.
Tensor fused_again(const Fused& n, const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::_fused_dropout_again", "")
                             .typed<Tensor(const Tensor&, const Tensor&, double, int64_t, at::IntArrayRef)>();
  return op.call(x, n.state, n.p, n.group, n.strides);
}

void save(AutogradContext* ctx, const Fused& n) {
  ctx->set_materialize_grads(false);
  ctx->save_for_backward({n.state});
  ctx->saved_data["p"] = n.p;
  ctx->saved_data["group"] = n.group;
  ctx->saved_data["strides"] = n.strides;
}

Fused restore(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {ctx->get_saved_variables()[0], data["p"].toDouble(), data["group"].toInt(), data["strides"].toIntVector()};
}

// A product with noise is its own derivative.
struct FusedAgain : Function<FusedAgain> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Fused* noise) {
    save(ctx, *noise);
    return fused_again(*noise, x);
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    const Fused noise = restore(ctx);
    return {apply(grads[0], &noise), Tensor()};
  }
};

struct FusedDropout : Function<FusedDropout> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, double p, Fused* used) {
    static const auto op = fused_op().typed<std::tuple<Tensor, Tensor, int64_t>(const Tensor&, double)>();
    auto [out, state, group] = op.call(input, p);
    *used = {state, p, group, input.strides().vec()};
    save(ctx, *used);
    return out;
  }
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(3);
    const Fused noise = restore(ctx);
    return {FusedAgain::apply(grads[0], &noise), Tensor(), Tensor()};
  }
};

Tensor aten_dropout(Kind kind, const Tensor& input, double p, bool train) {
  switch (kind) {
    case Kind::plain:
      return at::dropout(input, p, train);
    case Kind::feature:
      return at::feature_dropout(input, p, train);
    case Kind::alpha:
      return at::alpha_dropout(input, p, train);
    case Kind::feature_alpha:
      return at::feature_alpha_dropout(input, p, train);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Whether noise can be made again: also of tensors without memory, which stand for the CPU's.
bool makes_noise_again(const Tensor& x) {
  static const auto packer = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_act_mask", "");
  if (x.is_meta()) return !x.key_set().has(c10::DispatchKey::Python);
  return draws_again(x) && (x.is_cpu() || has_kernel(packer, x));
}

template <Kind kind>
Tensor draw_noise(const Tensor& input, double p, bool train, RecomputeArgument recompute) {
  const bool saves = train && p > 0 && p < 1 && input.numel() > 0 && (!per_feature(kind) || input.dim() >= 2) &&
                     needs_grad(input) && plain(input);
  const bool fused = saves && kind == Kind::plain && fits_fused(input);
  const bool other = kind == Kind::plain && input.is_cuda();  // what can't be computed again there keeps its mask
  if (!fused && (!saves || other || !makes_noise_again(input))) return aten_dropout(kind, input, p, train);
  if (fused) {
    Fused drawn;
    const Tensor out = FusedDropout::apply(input, p, &drawn);
    if (recompute.offered()) {
      const Tensor state = std::exchange(drawn.state, Tensor());
      offer(
          out, {input, state},
          [drawn](std::vector<Tensor>& operands, const std::vector<bool>&) {
            return fused_again({operands[1], drawn.p, drawn.group, drawn.strides}, operands[0]);
          },
          recompute);
    }
    return out;
  }
  Noise noise;
  const Tensor out = Dropout::apply(input, p, kind, &noise);
  if (recompute.offered()) {
    const Tensor from = std::exchange(noise.from, Tensor());
    offer(
        out, {input, from},
        [noise](std::vector<Tensor>& operands, const std::vector<bool>&) {
          Noise again = noise;
          again.from = operands[1];
          return with_noise(operands[0], scaled(draw_again(again, operands[0].options()), noise.kind, noise.p, true));
        },
        recompute);
  }
  return out;
}

Tensor run_dropout_effect(const Tensor& input, double p, bool train, bool draws, int64_t recompute) {
  if (draws && train && (p == 0 || p == 1) && needs_grad(input) && input.numel() > 0) {
    if (!input.is_cuda())
      at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
    else if (p == 0)  // with 1 its kernel is not run
      at::native_dropout(input.detach(), p, true);
  }
  return draw_noise<Kind::plain>(input, p, train, recompute);
}

Tensor run_dropout(const Tensor& input, double p, bool train, bool draws, int64_t recompute,
                   const c10::List<int64_t>& draw) {
  const Tensor out = run_dropout_effect(input, p, train, draws, recompute);
  return !draw.empty() && out.is_same(input) && needs_grad(input) ? out.clone() : out;
}

template <Kind kind>
Tensor run_effect(const Tensor& input, double p, bool train, int64_t recompute) {
  return draw_noise<kind>(input, p, train, recompute);
}

template <Kind kind>
Tensor run_drawing(const Tensor& input, double p, bool train, int64_t recompute, const c10::List<int64_t>&) {
  return draw_noise<kind>(input, p, train, recompute);
}

}  // namespace

void register_dropout(torch::Library& m) {
  m.def("_graph_offset(Tensor x) -> int");  // graph_offset(), on CUDA
  // aten::dropout of training on a dense CUDA tensor that is not empty, 0 < p < 1: its output, seed and counter, and
  // how many elements a thread drew together. Then the same noise times another tensor, as if that had x's strides.
  m.def("_fused_dropout(Tensor x, float p) -> (Tensor, Tensor, int)");
  m.def("_fused_dropout_again(Tensor x, Tensor state, float p, int group, int[] strides) -> Tensor");
  m.def("_draws_as_pytorch(Tensor x) -> bool");  // whether that is so on x's device, with this PyTorch
  // Moves the counter of CUDA's default generator on x's device, whose mutex the caller holds.
  m.def("_move_counter(Tensor x, int by) -> ()");
  // `draw` is a new, empty list in each call, which is said to be written to: so TorchScript's CSE does not merge two
  // draws, and a draw that nothing uses goes as aten's would. One that is not empty asks for a new tensor where a
  // gradient is needed and nothing is dropped, as TorchScript's own derivative (native_dropout) makes one.
  m.def("dropout(Tensor input, float p, bool train, bool draws, int recompute, int[](a!) draw) -> Tensor",
        TORCH_FN(run_dropout));
  m.def("feature_dropout(Tensor input, float p, bool train, int recompute, int[](a!) draw) -> Tensor",
        TORCH_FN(run_drawing<Kind::feature>));
  m.def("alpha_dropout(Tensor input, float p, bool train, int recompute, int[](a!) draw) -> Tensor",
        TORCH_FN(run_drawing<Kind::alpha>));
  m.def("feature_alpha_dropout(Tensor input, float p, bool train, int recompute, int[](a!) draw) -> Tensor",
        TORCH_FN(run_drawing<Kind::feature_alpha>));
  // Without that list, as version 0.1 wrote them and eager code calls them, they count as having an effect.
  const auto effect = c10::AliasAnalysisKind::CONSERVATIVE;
  m.def(torch::schema("dropout.effect(Tensor input, float p, bool train, bool draws=False, int recompute=0) -> Tensor",
                      effect),
        TORCH_FN(run_dropout_effect));
  m.def(torch::schema("feature_dropout.effect(Tensor input, float p, bool train, int recompute=0) -> Tensor", effect),
        TORCH_FN(run_effect<Kind::feature>));
  m.def(torch::schema("alpha_dropout.effect(Tensor input, float p, bool train, int recompute=0) -> Tensor", effect),
        TORCH_FN(run_effect<Kind::alpha>));
  m.def(torch::schema("feature_alpha_dropout.effect(Tensor input, float p, bool train, int recompute=0) -> Tensor",
                      effect),
        TORCH_FN(run_effect<Kind::feature_alpha>));
}

}  // namespace tsmem
