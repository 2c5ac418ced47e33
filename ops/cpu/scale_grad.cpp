// The gradient of a scale on the CPU.
#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

// Sums of grad * act(pre): per image and channel ([N, C], from a feature map of three dimensions or more), or, with
// last_dim, along the last dimension ([C]).
Tensor scale_grad_cpu(const Tensor& grad_output, const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                      const OptTensor& mean, const OptTensor& invstd, bool last_dim, const Act& act) {
  const bool channels_last = !last_dim && is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  Tensor x = input.contiguous(format), g = grad_output.contiguous(format);
  if (last_dim) x = x.view({-1, x.size(-1)}), g = g.view({-1, g.size(-1)});
  Map m(x, channels_last, act);
  NormArgs& a = m.args;
  a.x = x.const_data_ptr();
  a.grad = g.const_data_ptr();
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  const int64_t C = a.channels, images = last_dim ? 1 : x.size(0);
  Tensor out = last_dim ? at::empty({C}, options) : at::empty({images, C}, options);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    Coefficients<A> coefficients(m);
    if (mean) {
      coefficients = Coefficients<A>(m, weight, bias, mean, invstd);
      coefficients.use(a);
    }
    A* to = out.mutable_data_ptr<A>();
    const NormKernels& kernels = norm_kernels();
    if (a.planar()) {
      at::parallel_for(0, images * C, std::max<int64_t>(1, kSerial / a.inner), [&](int64_t begin, int64_t end) {
        // Whole rows of channels of one image at a time.
        while (begin < end) {
          const int64_t n = begin / C, c0 = begin % C, c1 = std::min(C, c0 + end - begin);
          std::vector<double> dot(c1 - c0);
          kernels.dot(a, {n, n + 1, c0, c1}, dot.data());
          for (int64_t i = 0; i < c1 - c0; ++i) to[begin + i] = static_cast<A>(dot[i]);
          begin += c1 - c0;
        }
      });
      return;
    }
    // Rows: each image in as many parts as keep the threads busy.
    const int64_t rows = a.outer / images, threads = m.numel < kSerial ? 1 : at::get_num_threads();
    const int64_t parts = std::clamp<int64_t>((threads + images - 1) / images, 1, rows),
                  step = (rows + parts - 1) / parts;
    std::vector<double> dot(images * parts * C);
    at::parallel_for(0, images * parts, m.numel < kSerial ? images * parts : 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t n = t / parts, r0 = std::min(t % parts * step, rows), r1 = std::min(r0 + step, rows);
        kernels.dot(a, {n * rows + r0, n * rows + r1, 0, C}, &dot[t * C]);
      }
    });
    for (int64_t n = 0; n < images; ++n)
      for (int64_t c = 0; c < C; ++c) {
        double sum = 0;
        for (int64_t t = 0; t < parts; ++t) sum += dot[(n * parts + t) * C + c];
        to[n * C + c] = static_cast<A>(sum);
      }
  });
  return out;
}

}  // namespace
}  // namespace cpu

void register_scale_grad_cpu(torch::Library& m) {
  using namespace cpu;
  m.impl("_scale_grad", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&scale_grad_cpu>::call)));
}

}  // namespace tsmem
