// Activations that a model spells out in other operators: x * sigmoid(x), 0.5 * x * (1 + erf(x / sqrt(2))). As one op
// they keep x alone, or what it is made from; PyTorch's keep every intermediate result.
//
// Computed as `act` (act.cpp) computes the activation, which rounds once where the formula rounds at every step.
#include <ATen/autocast_mode.h>

#include "activation.h"
#include "common.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

struct Formula {
  const char* name;                        // in the schema
  const char* act;                         // of act_table.h
  bool cast_on_cuda;                       // has an operator that CUDA's autocast runs in float32
  bool half_within;                        // TorchScript's autocast leaves its other factor in half precision
  Tensor (*spelled_out)(const Tensor& x);  // for what `act` does not take
};

template <bool by_pow>
Tensor gelu_tanh(const Tensor& x) {
  const Tensor cube = by_pow ? x.pow(3) : x * x * x;
  return 0.5 * x * (1 + at::tanh(0.7978845608028654 * (x + 0.044715 * cube)));
}

constexpr Formula kFormulas[] = {
    {"silu", "silu", false, true, [](const Tensor& x) { return x * at::sigmoid(x); }},
    {"hardswish", "hardswish", false, false, [](const Tensor& x) { return x * at::relu6(x + 3) / 6; }},
    {"mish", "mish", true, false, [](const Tensor& x) { return x * at::tanh(at::softplus(x)); }},
    {"gelu", "gelu", false, false, [](const Tensor& x) { return 0.5 * x * (1 + at::erf(x / std::sqrt(2.0))); }},
    {"gelu_tanh", "gelu_tanh", false, false, gelu_tanh<false>},
    {"gelu_tanh_pow", "gelu_tanh", true, false, gelu_tanh<true>},
};

const Formula& formula(c10::string_view name) {
  for (const Formula& f : kFormulas)
    if (name == f.name) return f;
  TORCH_CHECK_VALUE(false, "tsmem: no formula is named '", name, "'");
}

// in_place: whether the original's result is x, overwritten (kFirst), a value in between, overwritten (kSecond), or a
// new one (kNew). TorchScript's autocast makes every new product float32, and leaves the dtype of what is overwritten
// alone.
Tensor composed_act(const Tensor& self, c10::string_view name, int64_t recompute, int64_t in_place) {
  static const auto act = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("tsmem::act", "")
                              .typed<Tensor(const Tensor&, c10::string_view, at::ArrayRef<double>, int64_t, bool)>();
  const Formula& f = formula(name);
  if (!plain(self)) return f.spelled_out(self);
  const bool cast =
      f.cast_on_cuda && self.is_cuda() && low_precision(self) && at::autocast::is_autocast_enabled(at::kCUDA);
  const bool as_is = in_place == kFirst || (in_place == kSecond && f.half_within);
  if (as_is && autocast_casts(self, parse_act(f.act, {}))) return f.spelled_out(self);  // `act` would make it float32
  const Tensor x = cast    ? cast_for_autocast(at::kFloat, self, at::kCUDA, recompute)
                   : as_is ? self
                           : as_scripted(self, recompute);
  return act.call(x, f.act, {}, recompute, false);
}

}  // namespace

void register_composed_act(torch::Library& m) {
  m.def("composed_act(Tensor self, str formula, int recompute=0, int in_place=0) -> Tensor", TORCH_FN(composed_act));
}

}  // namespace tsmem
