#include "rewriter/verify/depthwise.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_convolution_native.h>
#include <ATen/ops/convolution_backward_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Sizes {
  int64_t batch, channels, multiplier;  // outputs of a channel
  int64_t in[2], out[2], kernel[2];     // height, width
  int64_t stride[2], padding[2], dilation[2];
  int64_t plane(const int64_t (&s)[2]) const { return s[0] * s[1]; }
};

bool plain(const Tensor& t) {
  return t.defined() && t.scalar_type() == at::kDouble && t.device().is_cpu() && t.layout() == at::kStrided;
}

// Nothing where PyTorch's own has to run, for it is another convolution or has to raise.
std::optional<Sizes> sizes_of(const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                              IntArrayRef dilation, bool transposed, int64_t groups) {
  if (transposed || !plain(input) || !plain(weight) || input.dim() != 4 || weight.dim() != 4) return {};
  if (stride.size() != 2 || padding.size() != 2 || dilation.size() != 2 || groups < 2) return {};
  if (input.size(1) != groups || weight.size(1) != 1 || weight.size(0) % groups != 0) return {};
  if (input.numel() == 0 || weight.numel() == 0) return {};
  Sizes s{input.size(0), groups, weight.size(0) / groups, {}, {}, {}, {}, {}, {}};
  for (int d : {0, 1}) {
    s.in[d] = input.size(2 + d);
    s.kernel[d] = weight.size(2 + d);
    s.stride[d] = stride[d];
    s.padding[d] = padding[d];
    s.dilation[d] = dilation[d];
    if (s.stride[d] < 1 || s.padding[d] < 0 || s.dilation[d] < 1) return {};
    const int64_t reach = s.in[d] + 2 * s.padding[d] - s.dilation[d] * (s.kernel[d] - 1) - 1;
    if (reach < 0) return {};
    s.out[d] = reach / s.stride[d] + 1;
  }
  return s;
}

// Calls f(kernel position, output offset, input offset, count) for each row of outputs that meets the input there.
template <typename F>
void for_each_row(const Sizes& s, F f) {
  for (int64_t i = 0; i < s.kernel[0]; ++i)
    for (int64_t j = 0; j < s.kernel[1]; ++j) {
      const int64_t shift[2] = {i * s.dilation[0] - s.padding[0], j * s.dilation[1] - s.padding[1]};
      int64_t first[2], end[2];  // outputs o with 0 <= o * stride + shift < in
      for (int d : {0, 1}) {
        first[d] = shift[d] < 0 ? (-shift[d] + s.stride[d] - 1) / s.stride[d] : 0;
        end[d] = s.in[d] > shift[d] ? std::min(s.out[d], (s.in[d] - shift[d] - 1) / s.stride[d] + 1) : 0;
      }
      if (first[1] >= end[1]) continue;
      for (int64_t y = first[0]; y < end[0]; ++y)
        f(i * s.kernel[1] + j, y * s.out[1] + first[1],
          (y * s.stride[0] + shift[0]) * s.in[1] + first[1] * s.stride[1] + shift[1], end[1] - first[1]);
    }
}

Tensor forward(const Sizes& s, const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto x = input.contiguous(), w = weight.contiguous();
  const auto b = bias && bias->defined() ? bias->contiguous() : Tensor();
  auto output = at::empty({s.batch, s.channels * s.multiplier, s.out[0], s.out[1]}, x.options());
  const auto *px = x.const_data_ptr<double>(), *pw = w.const_data_ptr<double>();
  const double* pb = b.defined() ? b.const_data_ptr<double>() : nullptr;
  auto* py = output.mutable_data_ptr<double>();
  const int64_t outputs = s.channels * s.multiplier, taps = s.plane(s.kernel), step = s.stride[1];
  at::parallel_for(0, s.batch * outputs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t o = p % outputs;
      double* y = py + p * s.plane(s.out);
      const double* in = px + (p / outputs * s.channels + o / s.multiplier) * s.plane(s.in);
      std::fill_n(y, s.plane(s.out), pb ? pb[o] : 0.0);
      for_each_row(s, [&](int64_t tap, int64_t to, int64_t from, int64_t n) {
        const double k = pw[o * taps + tap];
        double* __restrict__ r = y + to;
        const double* __restrict__ q = in + from;
        if (step == 1)
          for (int64_t c = 0; c < n; ++c) r[c] += k * q[c];
        else
          for (int64_t c = 0; c < n; ++c) r[c] += k * q[c * step];
      });
    }
  });
  return output.contiguous(input.suggest_memory_format());
}

Tensor input_gradient(const Sizes& s, const Tensor& gradient, const Tensor& weight) {
  auto result = at::zeros({s.batch, s.channels, s.in[0], s.in[1]}, gradient.options());
  const auto w = weight.contiguous();
  const auto *pg = gradient.const_data_ptr<double>(), *pw = w.const_data_ptr<double>();
  auto* px = result.mutable_data_ptr<double>();
  const int64_t taps = s.plane(s.kernel), step = s.stride[1];
  at::parallel_for(0, s.batch * s.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t m = 0; m < s.multiplier; ++m) {
        const double* g = pg + (p * s.multiplier + m) * s.plane(s.out);
        const double* k = pw + (p % s.channels * s.multiplier + m) * taps;
        for_each_row(s, [&](int64_t tap, int64_t to, int64_t from, int64_t n) {
          const double* __restrict__ r = g + to;
          double* __restrict__ q = px + p * s.plane(s.in) + from;
          if (step == 1)
            for (int64_t c = 0; c < n; ++c) q[c] += k[tap] * r[c];
          else
            for (int64_t c = 0; c < n; ++c) q[c * step] += k[tap] * r[c];
        });
      }
  });
  return result;
}

Tensor weight_gradient(const Sizes& s, const Tensor& gradient, const Tensor& input, const Tensor& weight) {
  auto result = at::zeros(weight.sizes(), gradient.options());
  const auto x = input.contiguous();
  const auto *pg = gradient.const_data_ptr<double>(), *px = x.const_data_ptr<double>();
  auto* pw = result.mutable_data_ptr<double>();
  const int64_t outputs = s.channels * s.multiplier, taps = s.plane(s.kernel), step = s.stride[1];
  at::parallel_for(0, outputs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t n = 0; n < s.batch; ++n) {
        const double* g = pg + (n * outputs + o) * s.plane(s.out);
        const double* in = px + (n * s.channels + o / s.multiplier) * s.plane(s.in);
        for_each_row(s, [&](int64_t tap, int64_t to, int64_t from, int64_t count) {
          double sums[4] = {0, 0, 0, 0};  // one sum alone waits for each addition
          const double *r = g + to, *q = in + from;
          int64_t c = 0;
          for (; c + 4 <= count; c += 4)
            for (int l = 0; l < 4; ++l) sums[l] += r[c + l] * q[(c + l) * step];
          for (; c < count; ++c) sums[0] += r[c] * q[c * step];
          pw[o * taps + tap] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        });
      }
  });
  return result;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups, bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32) {
  const auto s = sizes_of(input, weight, stride, padding, dilation, transposed, groups);
  const bool biased = bias && bias->defined();
  if (s && (!biased || (plain(*bias) && bias->dim() == 1 && bias->size(0) == weight.size(0))))
    return forward(*s, input, weight, bias);
  return at::native::_convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
                                  benchmark, deterministic, cudnn_enabled, allow_tf32);
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                                            at::OptionalIntArrayRef bias_sizes, IntArrayRef stride, IntArrayRef padding,
                                            IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                                            int64_t groups, std::array<bool, 3> mask) {
  const auto s = sizes_of(input, weight, stride, padding, dilation, transposed, groups);
  if (!s || !plain(gradient) || gradient.sizes() != IntArrayRef{s->batch, weight.size(0), s->out[0], s->out[1]})
    return at::native::convolution_backward(gradient, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  const auto g = gradient.contiguous();
  return {mask[0] ? input_gradient(*s, g, weight).contiguous(input.suggest_memory_format()) : Tensor(),
          mask[1] ? weight_gradient(*s, g, input, weight) : Tensor(), mask[2] ? g.sum({0, 2, 3}) : Tensor()};
}

}  // namespace

FastDepthwise::FastDepthwise()
    : library_(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, "rewriter/verify/depthwise.cpp", 0) {
  library_.impl("_convolution", TORCH_FN(convolution));
  library_.impl("convolution_backward", TORCH_FN(backward));
}

}  // namespace tsmem
