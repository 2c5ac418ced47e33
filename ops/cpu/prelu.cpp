// The raw ops of prelu on the CPU.
#include "cpu/prelu.h"

#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

// What the kernels see of x, and its parts for the threads.
struct PreluMap {
  PreluArgs args;
  int64_t numel, parts, step;

  PreluMap(const Tensor& x, int64_t slopes) : numel(x.numel()) {
    args.dtype = cpu_dtype(x.scalar_type());
    args.x = x.const_data_ptr();
    args.channels = slopes;
    if (slopes == 1)
      args.inner = numel;
    else if (x.is_contiguous())
      args.inner = numel / (x.size(0) * slopes);
    const int64_t threads = numel < kSerial || at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t unit = args.inner == 1 ? slopes : 1, units = numel / unit;
    parts = std::min<int64_t>(threads, units);
    step = (units + parts - 1) / parts * unit;
  }

  template <class F>
  void parallel(F f) const {
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) f(t, std::min(t * step, numel), std::min(t * step + step, numel));
    });
  }
};

Tensor prelu_cpu(const Tensor& x, const Tensor& weight, const OptTensor& out) {
  Tensor y = out ? *out : at::empty_like(x);
  PreluMap m(x, weight.numel());
  m.args.out = y.mutable_data_ptr();
  with_acc(x.scalar_type(), [&](auto zero) {
    const Vector<decltype(zero)> slopes(weight, 0);
    m.args.weight = slopes.data;
    m.parallel([&](int64_t, int64_t begin, int64_t end) { prelu_kernels().forward(m.args, begin, end); });
  });
  return y;
}

std::tuple<Tensor, Tensor> prelu_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                              std::array<bool, 2> want, const OptTensor& out) {
  const int64_t slopes = weight.numel();
  PreluMap m(x, slopes);
  Tensor to = !want[0] ? Tensor() : out ? *out : at::empty_like(x), of_weight;
  m.args.grad = grad.const_data_ptr();
  m.args.out = want[0] ? to.mutable_data_ptr() : nullptr;
  std::vector<double> sums(want[1] ? m.parts * slopes : 0);
  with_acc(x.scalar_type(), [&](auto zero) {
    const Vector<decltype(zero)> read(weight, 0);
    m.args.weight = read.data;
    m.parallel([&](int64_t part, int64_t begin, int64_t end) {
      prelu_kernels().backward(m.args, begin, end, want[1] ? &sums[part * slopes] : nullptr);
    });
  });
  if (want[1]) {
    of_weight = at::zeros({slopes}, x.options().dtype(at::kDouble));
    auto* total = of_weight.mutable_data_ptr<double>();
    for (size_t i = 0; i < sums.size(); ++i) total[i % slopes] += sums[i];
    of_weight = of_weight.to(weight.scalar_type()).view(weight.sizes());
  }
  return {to, of_weight};
}

}  // namespace
}  // namespace cpu

void register_prelu_cpu(torch::Library& m) {
  using namespace cpu;
  m.impl("_prelu", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&prelu_cpu>::call)));
  m.impl("_prelu_backward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&prelu_backward_cpu>::call)));
}

}  // namespace tsmem
