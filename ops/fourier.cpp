// Fourier transforms of real tensors, whose backward needs the input's sizes alone. PyTorch's own keeps the input for
// them (derivatives.yaml: _fft_r2c). These are PyTorch's operators and derivatives: what the node has saved is replaced
// by memory that nobody has.
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "common.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using Normalization = std::optional<c10::string_view>;
using Int = std::optional<int64_t>;
using Ints = at::OptionalIntArrayRef;

struct SizesAlone : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const Tensor& x) override {
    sizes = x.sizes().vec();
    strides = x.strides().vec();
    options = x.options();
  }
  Tensor call_unpack_hook() override { return shape_of(sizes, strides, options); }

  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
};

// Before it is transformed x may be cast (autocast), padded or cut into windows, and views may follow: the node is on
// the way from `out` to x.
Tensor keep_sizes(const Tensor& x, Tensor out) {
  using Transform = torch::autograd::generated::FftR2CBackward0;
  if (!needs_grad(x) || !plain(x) || hooks_active()) return out;
  torch::autograd::Node* node = out.grad_fn().get();
  while (node && node != x.grad_fn().get()) {
    if (auto* transform = dynamic_cast<Transform*>(node)) {
      transform->self_.register_hooks(std::make_unique<SizesAlone>());
      break;
    }
    node = node->num_outputs() > 0 ? node->next_edge(0).function.get() : nullptr;
  }
  return out;
}

// Of signals, one or a batch of them.
Tensor pad_both_ends(const Tensor& x, int64_t by, c10::string_view mode) {
  static const auto pad =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tsmem::pad", "")
          .typed<Tensor(const Tensor&, at::IntArrayRef, c10::string_view, std::optional<double>, int64_t)>();
  const Tensor batch = x.dim() == 1 ? x.unsqueeze(0).unsqueeze(0) : x.unsqueeze(0);
  const Tensor padded = pad.call(batch, {by, by}, mode, std::nullopt, 0).squeeze(0);
  return x.dim() == 1 ? padded.squeeze(0) : padded;
}

Tensor fft_fft(const Tensor& x, Int n, int64_t dim, Normalization norm) {
  return keep_sizes(x, at::fft_fft(x, n, dim, norm));
}
Tensor fft_rfft(const Tensor& x, Int n, int64_t dim, Normalization norm) {
  return keep_sizes(x, at::fft_rfft(x, n, dim, norm));
}
Tensor fft_rfft2(const Tensor& x, Ints s, at::IntArrayRef dim, Normalization norm) {
  return keep_sizes(x, at::fft_rfft2(x, s, dim, norm));
}
Tensor fft_rfftn(const Tensor& x, Ints s, Ints dim, Normalization norm) {
  return keep_sizes(x, at::fft_rfftn(x, s, dim, norm));
}
Tensor stft(const Tensor& x, int64_t n_fft, Int hop_length, Int win_length, const OptTensor& window, bool normalized,
            std::optional<bool> onesided, std::optional<bool> return_complex, std::optional<bool> align_to_window) {
  return keep_sizes(
      x, at::stft(x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window));
}
Tensor stft_center(const Tensor& x, int64_t n_fft, Int hop_length, Int win_length, const OptTensor& window, bool center,
                   c10::string_view pad_mode, bool normalized, std::optional<bool> onesided,
                   std::optional<bool> return_complex, std::optional<bool> align_to_window) {
  const bool pads = center && !align_to_window && needs_grad(x) && plain(x) && (x.dim() == 1 || x.dim() == 2);
  // As PyTorch's (SpectralOps.cpp), whose reflection keeps the signal too.
  const Tensor padded = pads ? pad_both_ends(x, n_fft / 2, pad_mode) : x;
  return keep_sizes(padded, at::stft(padded, n_fft, hop_length, win_length, window, center && !pads, pad_mode,
                                     normalized, onesided, return_complex, align_to_window));
}

}  // namespace

void register_fourier(torch::Library& m) {
  m.def("fft_fft(Tensor self, int? n=None, int dim=-1, str? norm=None) -> Tensor", TORCH_FN(fft_fft));
  m.def("fft_rfft(Tensor self, int? n=None, int dim=-1, str? norm=None) -> Tensor", TORCH_FN(fft_rfft));
  m.def("fft_rfft2(Tensor self, int[1]? s=None, int[1] dim=[-2, -1], str? norm=None) -> Tensor", TORCH_FN(fft_rfft2));
  m.def("fft_rfftn(Tensor self, int[1]? s=None, int[1]? dim=None, str? norm=None) -> Tensor", TORCH_FN(fft_rfftn));
  m.def(
      "stft(Tensor self, int n_fft, int? hop_length=None, int? win_length=None, Tensor? window=None, bool "
      "normalized=False, bool? onesided=None, bool? return_complex=None, bool? align_to_window=None) -> Tensor",
      TORCH_FN(stft));
  m.def(
      "stft.center(Tensor self, int n_fft, int? hop_length=None, int? win_length=None, Tensor? window=None, bool "
      "center=True, str pad_mode=\"reflect\", bool normalized=False, bool? onesided=None, bool? return_complex=None, "
      "bool? align_to_window=None) -> Tensor",
      TORCH_FN(stft_center));
}

}  // namespace tsmem
