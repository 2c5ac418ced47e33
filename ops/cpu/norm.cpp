// The raw normalisation ops on CPU: splits work over threads, keeps statistics per channel, calls the kernels.
#include "cpu/norm.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>

#include "act_table.h"
#include "cpu_dtype.h"
#include "norm_ops.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {

namespace {

using at::Tensor;

constexpr int64_t kSerial = 1 << 15;         // elements that are not worth a second thread
constexpr int64_t kGroupBytes = 256 * 1024;  // of one map, so that the second pass over a group of channels reads L2

// Maps of so many bytes leave the caches before anyone reads them: what a step of training reads and writes between is
// a multiple of them.
int64_t stream_bytes() {
  static const int64_t kib = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t n = 0;
    return file >> n && file.get() == 'K' ? n : std::numeric_limits<int64_t>::max() / 1024;
  }();
  return kib * 1024 / 16;
}

// x as the kernels see it, and its parts for the threads.
struct Map {
  NormArgs args;
  int64_t numel = 0, bytes = 0;
  bool by_channel = false;  // both passes of a group of channels run in one go
  int64_t group = 1;        // channels (by_channel) or outer steps in a task
  int64_t tasks = 1;

  Map(const Tensor& x, bool channels_last, const Act& act) {
    NormArgs& a = args;
    a.dtype = cpu_dtype(x.scalar_type());
    a.act = act;
    numel = x.numel();
    bytes = numel * x.element_size();
    a.channels = x.size(1);
    a.inner = 1;
    if (channels_last || x.dim() == 2 || numel == x.size(0) * x.size(1)) {
      a.outer = numel / std::max<int64_t>(a.channels, 1);
      a.period = a.channels * (16 / std::gcd(a.channels, int64_t{16}));
      while (a.period < 256) a.period *= 2;
    } else {
      a.outer = x.size(0);
      a.inner = numel / (a.outer * a.channels);
    }
    const int64_t threads = numel < kSerial || at::in_parallel_region() ? 1 : at::get_num_threads();
    by_channel = a.planar() && (a.channels >= threads || a.outer == 1);
    if (by_channel) {
      const int64_t bytes = std::max<int64_t>(a.outer * a.inner * x.element_size(), 1);
      group = std::clamp<int64_t>(kGroupBytes / bytes, 1, (a.channels + threads - 1) / threads);
      tasks = (a.channels + group - 1) / group;
    } else {
      group = (a.outer + threads - 1) / threads;
      if (!a.planar()) group = (group + 7) / 8 * 8;  // masks of a task start at a byte
      tasks = (a.outer + group - 1) / group;
    }
  }

  NormRange range(int64_t task) const {
    const int64_t begin = task * group;
    if (by_channel) return {0, args.outer, begin, std::min(begin + group, args.channels)};
    return {begin, std::min(begin + group, args.outer), 0, args.channels};
  }

  template <class F>
  void parallel(F f) const {
    at::parallel_for(0, tasks, numel < kSerial ? tasks : 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) f(t, range(t));
    });
  }

  // The arguments of a pass that writes out.
  NormArgs writing(NormArgs a) const {
    a.stream = bytes >= stream_bytes() && a.out != a.x && a.out != a.other && a.out != a.grad;
    return a;
  }

  int64_t table_size() const { return std::max(args.period, args.channels); }
};

// Coefficients per channel, repeated up to the period.
template <class A>
struct Table {
  std::vector<A> values;
  explicit Table(const Map& m) : values(m.table_size()) {}
  void repeat(const Map& m) {
    for (int64_t i = m.args.channels; i < m.table_size(); ++i) values[i] = values[i - m.args.channels];
  }
  A& operator[](int64_t c) { return values[c]; }
};

// The numbers of a small vector, or `otherwise` where there is none. Reads them itself: a call of at::to takes as long
// as the norm of a small plane.
template <class A>
struct Vector {
  std::vector<A> converted;
  const A* data = nullptr;
  A otherwise;
  Vector(const OptTensor& t, A otherwise) : otherwise(otherwise) {
    if (!t || !t->defined()) return;
    if (t->scalar_type() == c10::CppTypeToScalarType<A>::value && t->is_contiguous()) {
      data = t->const_data_ptr<A>();
      return;
    }
    converted.reserve(t->numel());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, t->scalar_type(), "batch_norm", [&] {
      const scalar_t* from = t->const_data_ptr<scalar_t>();
      const int64_t step = t->stride(0);
      for (int64_t i = 0; i < t->numel(); ++i) converted.push_back(static_cast<A>(from[i * step]));
    });
    data = converted.data();
  }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;
  A operator[](int64_t c) const { return data ? data[c] : otherwise; }
};

void update_running(const OptTensor& running, const std::vector<double>& now, double momentum) {
  if (!running || !running->defined()) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, running->scalar_type(), "batch_norm", [&] {
    scalar_t* r = running->mutable_data_ptr<scalar_t>();
    const int64_t step = running->stride(0);
    for (size_t c = 0; c < now.size(); ++c, r += step)
      *r = static_cast<scalar_t>(momentum * now[c] + (1 - momentum) * static_cast<double>(*r));
  });
}

// Kernel arguments of pre = (x - mean) * scale + bias.
template <class A>
struct Coefficients {
  Table<A> mean, scale, bias;
  explicit Coefficients(const Map& m) : mean(m), scale(m), bias(m) {}
  Coefficients(const Map& m, const OptTensor& weight, const OptTensor& shift, const OptTensor& means,
               const OptTensor& invstds)
      : Coefficients(m) {
    const Vector<A> w(weight, 1), b(shift, 0), mu(means, 0), s(invstds, 1);
    for (int64_t c = 0; c < m.args.channels; ++c) set(c, mu[c], s[c], w[c], b[c]);
    repeat(m);
  }
  void set(int64_t c, A m, A invstd, A weight, A b) { mean[c] = m, scale[c] = invstd * weight, bias[c] = b; }
  void repeat(const Map& m) { mean.repeat(m), scale.repeat(m), bias.repeat(m); }
  void use(NormArgs& a) const {
    a.mean = mean.values.data(), a.scale = scale.values.data(), a.bias = bias.values.data();
  }
};

// Statistics and, where there is an output, act(pre + other).
template <class A>
void forward(Map& m, const BatchNormArgs& bn, Tensor& mean_out, Tensor& invstd_out) {
  NormArgs& a = m.args;
  const NormKernels& kernels = norm_kernels();
  const Vector<A> weight(bn.weight, 1), bias(bn.bias, 0);
  A *mean = mean_out.mutable_data_ptr<A>(), *invstd = invstd_out.mutable_data_ptr<A>();
  Coefficients<A> coefficients(m);
  coefficients.use(a);
  if (!bn.training) {
    const Vector<double> running_mean(bn.running_mean, 0), running_var(bn.running_var, 1);
    for (int64_t c = 0; c < a.channels; ++c) {
      mean[c] = static_cast<A>(running_mean[c]);
      invstd[c] = static_cast<A>(1 / std::sqrt(running_var[c] + bn.eps));
      coefficients.set(c, mean[c], invstd[c], weight[c], bias[c]);
    }
    coefficients.repeat(m);
    if (a.out) m.parallel([&](int64_t, NormRange r) { kernels.apply(m.writing(a), r); });
    return;
  }
  const double count = static_cast<double>(a.outer * a.inner);
  std::vector<double> means(a.channels), m2s(a.channels);
  auto finish = [&](int64_t c0, int64_t c1) {
    for (int64_t c = c0; c < c1; ++c)
      if (!std::isfinite(means[c]) || !std::isfinite(m2s[c])) kernels.exact_stats(a, c, &means[c], &m2s[c]);
    const double* m2 = m2s.data();
    for (int64_t c = c0; c < c1; ++c) invstd[c] = static_cast<A>(1 / std::sqrt(m2[c] / count + bn.eps));
    for (int64_t c = c0; c < c1; ++c) {
      if (bn.eps == 0 && m2[c] / count == 0) invstd[c] = 0;
      mean[c] = static_cast<A>(means[c]);
      coefficients.set(c, mean[c], invstd[c], weight[c], bias[c]);
    }
  };
  if (m.by_channel) {
    m.parallel([&](int64_t, NormRange r) {
      kernels.stats(a, r, &means[r.c0], &m2s[r.c0]);
      finish(r.c0, r.c1);
      if (a.out) kernels.apply(m.writing(a), r);
    });
  } else {
    std::vector<double> part_mean(m.tasks * a.channels), part_m2(m.tasks * a.channels);
    m.parallel(
        [&](int64_t t, NormRange r) { kernels.stats(a, r, &part_mean[t * a.channels], &part_m2[t * a.channels]); });
    double n = 0;
    for (int64_t t = 0; t < m.tasks; ++t) {
      const NormRange r = m.range(t);
      const double k = static_cast<double>((r.o1 - r.o0) * a.inner), share = k / (n + k);
      for (int64_t c = 0; c < a.channels; ++c) {
        const double delta = part_mean[t * a.channels + c] - means[c];
        means[c] += delta * share;
        m2s[c] += part_m2[t * a.channels + c] + delta * delta * n * share;
      }
      n += k;
    }
    finish(0, a.channels);
    coefficients.repeat(m);
    if (a.out) m.parallel([&](int64_t, NormRange r) { kernels.apply(m.writing(a), r); });
  }
  update_running(bn.running_mean, means, bn.momentum);
  for (double& v : m2s) v /= count - 1;
  update_running(bn.running_var, m2s, bn.momentum);
}

template <class A>
void backward(Map& m, const NormBackward& b, std::array<bool, 4> want, Tensor& grad_weight, Tensor& grad_bias) {
  NormArgs& a = m.args;
  const NormKernels& kernels = norm_kernels();
  const Vector<A> invstd(b.invstd, 1);
  Coefficients<A> coefficients(m, b.weight, b.bias, b.mean, b.invstd);
  coefficients.use(a);
  Table<A> tilt(m), level(m);
  a.slope = a.scale;
  const bool through_stats = b.training && want[0];
  const bool sums = through_stats || want[1] || want[2] || want[3];
  if (through_stats) a.tilt = tilt.values.data(), a.level = level.values.data();

  // A smooth activation's derivative is dear: where no precision is lost, the first pass leaves the gradient before the
  // activation in memory that the second one has to write anyway.
  // So it does where the first pass overwrites the gradient.
  NormArgs second = a;
  bool from_first = a.grad_other && a.grad_other == a.grad;
  if (sums && want[0] && !one_bit(a.act.kind) && a.act.kind != ActKind::identity &&
      sizeof(A) == b.grad.element_size()) {
    if (!a.grad_other) a.grad_other = a.out;
    from_first = true;
  }
  if (from_first) {
    second.grad = a.grad_other;
    second.grad_other = nullptr;
    second.other = nullptr;
    second.from_mask = false;
    second.act = {};
  }

  const double share = 1 / static_cast<double>(a.outer * a.inner);
  A *weight_grad = want[1] ? grad_weight.mutable_data_ptr<A>() : nullptr,
    *bias_grad = want[2] ? grad_bias.mutable_data_ptr<A>() : nullptr;
  auto finish = [&](int64_t c, double sum, double dot) {
    dot *= static_cast<double>(invstd[c]);
    if (weight_grad) weight_grad[c] = static_cast<A>(dot);
    if (bias_grad) bias_grad[c] = static_cast<A>(sum);
    const double scale = static_cast<double>(coefficients.scale[c]) * share;
    tilt[c] = static_cast<A>(scale * static_cast<double>(invstd[c]) * dot);
    level[c] = static_cast<A>(scale * sum);
  };
  if (m.by_channel || !sums) {
    m.parallel([&](int64_t, NormRange r) {
      if (sums) {
        std::vector<double> sum(r.c1 - r.c0), dot(r.c1 - r.c0);
        kernels.reduce(a, r, sum.data(), dot.data());
        for (int64_t c = r.c0; c < r.c1; ++c) finish(c, sum[c - r.c0], dot[c - r.c0]);
      }
      if (want[0]) kernels.grad(m.writing(second), r);
    });
    return;
  }
  std::vector<double> sum(m.tasks * a.channels), dot(m.tasks * a.channels);
  m.parallel([&](int64_t t, NormRange r) { kernels.reduce(a, r, &sum[t * a.channels], &dot[t * a.channels]); });
  for (int64_t c = 0; c < a.channels; ++c) {
    for (int64_t t = 1; t < m.tasks; ++t) sum[c] += sum[t * a.channels + c], dot[c] += dot[t * a.channels + c];
    finish(c, sum[c], dot[c]);
  }
  tilt.repeat(m), level.repeat(m);
  if (want[0]) m.parallel([&](int64_t, NormRange r) { kernels.grad(m.writing(second), r); });
}

template <class F>
void with_acc(at::ScalarType t, F f) {
  if (t == at::kDouble)
    f(double());
  else
    f(float());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& input, const OptTensor& weight,
                                                       const OptTensor& bias, const OptTensor& running_mean,
                                                       const OptTensor& running_var, const OptTensor& other,
                                                       bool training, double momentum, double eps, const Act& act,
                                                       bool keep_mask) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  Map m(x, channels_last, act);
  Tensor out = at::empty_like(x, x.options(), format);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor mean = at::empty({m.args.channels}, options), invstd = at::empty({m.args.channels}, options);
  Tensor mask = at::empty({keep_mask ? m.args.mask_bytes() : 0}, x.options().dtype(at::kByte));
  m.args.x = x.const_data_ptr();
  m.args.out = out.mutable_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  if (keep_mask) m.args.mask = mask.mutable_data_ptr<uint8_t>();
  const BatchNormArgs bn{weight, bias, running_mean, running_var, training, momentum, eps};
  with_acc(x.scalar_type(), [&](auto a) { forward<decltype(a)>(m, bn, mean, invstd); });
  return {out, mean, invstd, mask};
}

// act(pre + other) from statistics that are known. `out`: memory to write to, which may be other's.
Tensor apply_cpu(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                 const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out_memory) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(input.dim(), channels_last);
  const Tensor x = input.contiguous(format), z = other ? other->contiguous(format) : Tensor();
  Map m(x, channels_last, act);
  const bool reuse = out_memory && out_memory->strides() == x.strides();
  Tensor out = reuse ? *out_memory : at::empty_like(x, x.options(), format);
  m.args.x = x.const_data_ptr();
  m.args.out = out.mutable_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.parallel([&](int64_t, NormRange r) { norm_kernels().apply(m.writing(m.args), r); });
  });
  return out;
}

Tensor apply_meta(const Tensor& input, const OptTensor&, const OptTensor&, const Tensor&, const Tensor&,
                  const OptTensor&, const Act&, const OptTensor&) {
  return at::empty_symint(input.sym_sizes(), input.options(), feature_format(input.dim(), is_channels_last(input)));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_output, const OptTensor& input,
                                                        const OptTensor& weight, const OptTensor& bias,
                                                        const Tensor& mean, const Tensor& invstd,
                                                        const OptTensor& other, const OptTensor& mask, bool training,
                                                        bool channels_last, const Act& act, std::array<bool, 4> want,
                                                        bool overwrite) {
  const auto format = feature_format(grad_output.dim(), channels_last);
  const Tensor g = grad_output.contiguous(format);
  const Tensor x = input ? input->contiguous(format) : Tensor(), z = other ? other->contiguous(format) : Tensor();
  const Tensor bits = mask ? mask->contiguous() : Tensor();
  Map m(g, channels_last, act);
  m.args.from_mask = bits.defined();
  m.args.grad = g.const_data_ptr();
  if (x.defined()) m.args.x = x.const_data_ptr();
  if (z.defined()) m.args.other = z.const_data_ptr();
  if (bits.defined()) m.args.mask = const_cast<uint8_t*>(bits.const_data_ptr<uint8_t>());
  Tensor grads[4];
  const auto options = g.options().dtype(acc_type(g.scalar_type()));
  // The gradient's own memory serves for one of the results.
  const int reused = !overwrite || !g.is_same(grad_output) ? -1 : want[3] ? 3 : want[0] ? 0 : -1;
  for (int i : {0, 3})
    if (want[i]) grads[i] = i == reused ? g : at::empty_like(g, g.options(), format);
  for (int i : {1, 2})
    if (want[i]) grads[i] = at::empty({m.args.channels}, options);
  if (want[0]) m.args.out = grads[0].mutable_data_ptr();
  if (want[3]) m.args.grad_other = grads[3].mutable_data_ptr();
  const NormBackward b{g, input, weight, bias, mean, invstd, other, mask, training, channels_last};
  with_acc(g.scalar_type(), [&](auto a) { backward<decltype(a)>(m, b, want, grads[1], grads[2]); });
  return {grads[0], grads[1], grads[2], grads[3]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_meta(const Tensor& input, const OptTensor&, const OptTensor&,
                                                        const OptTensor&, const OptTensor&, const OptTensor&, bool,
                                                        double, double, const Act&, bool keep_mask) {
  const bool channels_last = is_channels_last(input);
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  const auto channels = input.sym_size(1);
  Tensor out = at::empty_symint(input.sym_sizes(), input.options(), feature_format(input.dim(), channels_last));
  const auto spatial = input.sym_numel() / input.sym_size(0) / channels;
  // As NormArgs::mask_bytes().
  const auto bytes = channels_last || input.dim() == 2 || spatial == 1
                         ? (input.sym_numel() + 7) / 8
                         : input.sym_size(0) * channels * ((spatial + 7) / 8);
  return {out, at::empty_symint({channels}, options), at::empty_symint({channels}, options),
          at::empty_symint({keep_mask ? bytes : c10::SymInt(0)}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor& g, const OptTensor&, const OptTensor&,
                                                         const OptTensor&, const Tensor&, const Tensor&,
                                                         const OptTensor&, const OptTensor&, bool, bool channels_last,
                                                         const Act&, std::array<bool, 4> want, bool) {
  const auto format = feature_format(g.dim(), channels_last);
  auto map = [&](bool wanted) { return wanted ? at::empty_symint(g.sym_sizes(), g.options(), format) : Tensor(); };
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint({g.sym_size(1)}, g.options().dtype(acc_type(g.scalar_type()))) : Tensor();
  };
  return {map(want[0]), vector(want[1]), vector(want[2]), map(want[3])};
}

// --- With max pooling

NormPoolArgs pool_args(const Map& m, const Tensor& x, at::IntArrayRef out_size, at::IntArrayRef kernel,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                       const Tensor& positions, bool channels_last) {
  NormPoolArgs p;
  p.norm = m.args;
  p.rows = channels_last;
  p.images = x.size(0), p.height = x.size(2), p.width = x.size(3);
  p.out_height = out_size[0], p.out_width = out_size[1];
  for (int d = 0; d < 2; ++d)
    p.kernel[d] = kernel[d], p.stride[d] = stride[d], p.padding[d] = padding[d], p.dilation[d] = dilation[d];
  p.positions = positions.defined() && positions.numel() > 0 ? positions.data_ptr() : nullptr;
  p.position_bytes = static_cast<int>(c10::elementSize(position_type(kernel)));
  return p;
}

// f(begin, end) over planes, or images with channels_last.
template <class F>
void parallel_planes(const NormPoolArgs& p, int64_t numel, F f) {
  const int64_t planes = p.rows ? p.images : p.images * p.norm.channels;
  at::parallel_for(0, planes, std::max<int64_t>(1, kSerial * planes / std::max<int64_t>(numel, 1)), f);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pool_forward_cpu(const Tensor& input, const OptTensor& weight,
                                                            const OptTensor& bias, const OptTensor& running_mean,
                                                            const OptTensor& running_var, bool training,
                                                            double momentum, double eps, const Act& act,
                                                            at::IntArrayRef kernel, at::IntArrayRef stride,
                                                            at::IntArrayRef padding, at::IntArrayRef dilation,
                                                            at::IntArrayRef out_size, bool keep_positions) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format);
  Map m(x, channels_last, act);
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  Tensor mean = at::empty({m.args.channels}, options), invstd = at::empty({m.args.channels}, options);
  m.args.x = x.const_data_ptr();
  const std::vector<int64_t> sizes{x.size(0), x.size(1), out_size[0], out_size[1]};
  Tensor out = at::empty(sizes, x.options(), format);
  Tensor positions = keep_positions ? at::empty(sizes, x.options().dtype(position_type(kernel)), format)
                                    : at::empty({0}, x.options().dtype(position_type(kernel)));
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    forward<A>(m, {weight, bias, running_mean, running_var, training, momentum, eps}, mean, invstd);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.out = out.mutable_data_ptr();
    const NormPoolArgs p = pool_args(m, x, out_size, kernel, stride, padding, dilation, positions, channels_last);
    parallel_planes(p, m.numel, [&](int64_t begin, int64_t end) { norm_pool_kernels().forward(p, begin, end); });
  });
  return {out, mean, invstd, positions};
}

// The pooled output again, from statistics and positions that are known.
Tensor pool_apply_cpu(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                      const Tensor& invstd, const Tensor& positions, const Act& act, at::IntArrayRef kernel,
                      at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                      at::IntArrayRef out_size) {
  const bool channels_last = is_channels_last(input);
  const auto format = feature_format(4, channels_last);
  const Tensor x = input.contiguous(format), taken = positions.contiguous(format);
  Map m(x, channels_last, act);
  m.args.x = x.const_data_ptr();
  Tensor out = at::empty({x.size(0), x.size(1), out_size[0], out_size[1]}, x.options(), format);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.out = out.mutable_data_ptr();
    const NormPoolArgs p = pool_args(m, x, out_size, kernel, stride, padding, dilation, taken, channels_last);
    parallel_planes(p, out.numel(), [&](int64_t begin, int64_t end) { norm_pool_kernels().again(p, begin, end); });
  });
  return out;
}

Tensor pool_apply_meta(const Tensor& input, const OptTensor&, const OptTensor&, const Tensor&, const Tensor&,
                       const Tensor&, const Act&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                       at::IntArrayRef out_size) {
  return at::empty_symint({input.sym_size(0), input.sym_size(1), out_size[0], out_size[1]}, input.options(),
                          feature_format(4, is_channels_last(input)));
}

std::tuple<Tensor, Tensor, Tensor> pool_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                     const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                     const Tensor& invstd, const Tensor& positions, bool training,
                                                     bool channels_last, const Act& act, at::IntArrayRef kernel,
                                                     at::IntArrayRef stride, at::IntArrayRef padding,
                                                     at::IntArrayRef dilation, std::array<bool, 3> want) {
  const auto format = feature_format(4, channels_last);
  const Tensor g = grad_output.contiguous(format), x = input.contiguous(format), taken = positions.contiguous(format);
  Map m(x, channels_last, act);
  m.args.x = x.const_data_ptr();
  m.args.grad = g.const_data_ptr();
  Tensor grads[3];
  const auto options = x.options().dtype(acc_type(x.scalar_type()));
  if (want[0]) grads[0] = at::empty_like(x, x.options(), format), m.args.out = grads[0].mutable_data_ptr();
  for (int i : {1, 2})
    if (want[i]) grads[i] = at::empty({m.args.channels}, options);
  with_acc(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const Vector<A> s(invstd, 1);
    Coefficients<A> coefficients(m, weight, bias, mean, invstd);
    coefficients.use(m.args);
    m.args.slope = m.args.scale;
    Table<A> tilt(m), level(m);
    NormPoolArgs p = pool_args(m, x, g.sizes().slice(2), kernel, stride, padding, dilation, taken, channels_last);
    const int64_t channels = m.args.channels;
    if (training || want[1] || want[2]) {
      // Sums of one image each, added in order: the same for any number of threads.
      std::vector<double> sum(p.images * channels), dot(p.images * channels);
      parallel_planes(p, g.numel(), [&](int64_t begin, int64_t end) {
        const int64_t per_image = p.rows ? 1 : channels;
        for (int64_t i = begin; i < end; ++i)
          norm_pool_kernels().reduce(p, i, i + 1, &sum[i / per_image * channels], &dot[i / per_image * channels]);
      });
      const double count = static_cast<double>(m.args.outer * m.args.inner);
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t n = 1; n < p.images; ++n) sum[c] += sum[n * channels + c], dot[c] += dot[n * channels + c];
        dot[c] *= static_cast<double>(s[c]);
        if (want[1]) grads[1].mutable_data_ptr<A>()[c] = static_cast<A>(dot[c]);
        if (want[2]) grads[2].mutable_data_ptr<A>()[c] = static_cast<A>(sum[c]);
        const double scale = static_cast<double>(coefficients.scale[c]);
        tilt[c] = static_cast<A>(scale * static_cast<double>(s[c]) * dot[c] / count);
        level[c] = static_cast<A>(scale * sum[c] / count);
      }
      tilt.repeat(m), level.repeat(m);
    }
    if (!want[0]) return;
    if (training) p.norm.tilt = tilt.values.data(), p.norm.level = level.values.data();
    p.norm = m.writing(p.norm);
    parallel_planes(p, m.numel, [&](int64_t begin, int64_t end) { norm_pool_kernels().grad(p, begin, end); });
  });
  return {grads[0], grads[1], grads[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pool_forward_meta(const Tensor& input, const OptTensor&, const OptTensor&,
                                                             const OptTensor&, const OptTensor&, bool, double, double,
                                                             const Act&, at::IntArrayRef kernel, at::IntArrayRef,
                                                             at::IntArrayRef, at::IntArrayRef, at::IntArrayRef out_size,
                                                             bool keep_positions) {
  const auto format = feature_format(4, is_channels_last(input));
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  const std::vector<c10::SymInt> sizes{input.sym_size(0), input.sym_size(1), out_size[0], out_size[1]};
  const auto kind = input.options().dtype(position_type(kernel));
  return {at::empty_symint(sizes, input.options(), format), at::empty_symint({input.sym_size(1)}, options),
          at::empty_symint({input.sym_size(1)}, options),
          keep_positions ? at::empty_symint(sizes, kind, format) : at::empty({0}, kind)};
}

std::tuple<Tensor, Tensor, Tensor> pool_backward_meta(const Tensor&, const Tensor& x, const OptTensor&,
                                                      const OptTensor&, const Tensor&, const Tensor&, const Tensor&,
                                                      bool, bool channels_last, const Act&, at::IntArrayRef,
                                                      at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                                                      std::array<bool, 3> want) {
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint({x.sym_size(1)}, x.options().dtype(acc_type(x.scalar_type()))) : Tensor();
  };
  return {want[0] ? at::empty_symint(x.sym_sizes(), x.options(), feature_format(4, channels_last)) : Tensor(),
          vector(want[1]), vector(want[2])};
}

// --- The gradient of a scale

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

Tensor scale_grad_meta(const Tensor&, const Tensor& input, const OptTensor&, const OptTensor&, const OptTensor&,
                       const OptTensor&, bool last_dim, const Act&) {
  const auto options = input.options().dtype(acc_type(input.scalar_type()));
  if (last_dim) return at::empty_symint({input.sym_size(-1)}, options);
  return at::empty_symint({input.sym_size(0), input.sym_size(1)}, options);
}

}  // namespace

void register_norm(torch::Library& m) {
  m.def(
      "_batch_norm_act_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, "
      "Tensor? other, bool training, float momentum, float eps, int act, float act_a, float act_b, float act_c, bool "
      "keep_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_backward(Tensor(a!) grad, Tensor? input, Tensor? weight, Tensor? bias, Tensor mean, Tensor "
      "invstd, "
      "Tensor? other, Tensor? mask, bool training, bool channels_last, int act, float act_a, float act_b, float act_c, "
      "bool[4] want, bool overwrite_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_max_pool2d_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, bool training, float momentum, float eps, int act, float act_a, float act_b, float "
      "act_c, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, int[2] out_size, bool keep_positions) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_max_pool2d_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor invstd, "
      "Tensor positions, bool training, bool channels_last, int act, float act_a, float act_b, float act_c, int[2] "
      "kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, bool[3] want) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_batch_norm_act_apply(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor? other, "
      "int act, float act_a, float act_b, float act_c, Tensor(a!)? out) -> Tensor");
  m.def(
      "_batch_norm_act_max_pool2d_apply(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "Tensor positions, int act, float act_a, float act_b, float act_c, int[2] kernel_size, int[2] stride, int[2] "
      "padding, "
      "int[2] dilation, int[2] out_size) -> Tensor");
  m.def(
      "_scale_grad(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? invstd, bool "
      "last_dim, int act, "
      "float act_a, float act_b, float act_c) -> Tensor");
  m.impl("_batch_norm_act_apply", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&apply_cpu>::call)));
  m.impl("_batch_norm_act_max_pool2d_apply", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&pool_apply_cpu>::call)));
  m.impl("_batch_norm_act_forward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&forward_cpu>::call)));
  m.impl("_batch_norm_act_backward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&backward_cpu>::call)));
  m.impl("_batch_norm_act_max_pool2d_forward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&pool_forward_cpu>::call)));
  m.impl("_batch_norm_act_max_pool2d_backward", c10::DispatchKey::CPU,
         TORCH_FN((FromSchema<&pool_backward_cpu>::call)));
  m.impl("_scale_grad", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&scale_grad_cpu>::call)));
  m.impl("_batch_norm_act_apply", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&apply_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_apply", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&pool_apply_meta>::call)));
  m.impl("_batch_norm_act_forward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&forward_meta>::call)));
  m.impl("_batch_norm_act_backward", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&backward_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_forward", c10::DispatchKey::Meta,
         TORCH_FN((FromSchema<&pool_forward_meta>::call)));
  m.impl("_batch_norm_act_max_pool2d_backward", c10::DispatchKey::Meta,
         TORCH_FN((FromSchema<&pool_backward_meta>::call)));
  m.impl("_scale_grad", c10::DispatchKey::Meta, TORCH_FN((FromSchema<&scale_grad_meta>::call)));
}

}  // namespace tsmem
