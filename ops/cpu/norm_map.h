// A feature map as the CPU's normalisation kernels see it, its parts for the threads, and their coefficients.
#pragma once
#include <ATen/Parallel.h>

#include <numeric>
#include <vector>

#include "cpu/norm.h"
#include "cpu_dtype.h"
#include "norm_ops.h"

namespace tsmem::cpu {

using at::Tensor;

inline constexpr int64_t kSerial = 1 << 15;  // elements that are not worth a second thread
// Of one map, so that the second pass over a group of channels reads L2.
inline constexpr int64_t kGroupBytes = 256 * 1024;

// Maps of so many bytes leave the caches before anyone reads them: what a step of training reads and writes between is
// a multiple of them.
int64_t stream_bytes();

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
      const int64_t step = t->dim() ? t->stride(0) : 1;
      for (int64_t i = 0; i < t->numel(); ++i) converted.push_back(static_cast<A>(from[i * step]));
    });
    data = converted.data();
  }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;
  A operator[](int64_t c) const { return data ? data[c] : otherwise; }
};

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

// Calls f with a zero of the type that statistics and coefficients have.
template <class F>
void with_acc(at::ScalarType t, F f) {
  if (t == at::kDouble)
    f(double());
  else
    f(float());
}

// Statistics of m.args.x, into `mean` and `invstd` and, in training, the running ones; and, where m.args.out is there,
// act(pre + other). In norm.cpp.
void forward(Map& m, const BatchNormArgs& bn, Tensor& mean, Tensor& invstd);

// Of a map whose tasks are not groups of channels: what stats() and reduce() find of each channel, over all tasks. The
// results are of so many channels, and zeros. In norm.cpp.
void stats_of_all(const Map& m, std::vector<double>& mean, std::vector<double>& m2);
void sums_of_all(const Map& m, const NormArgs& a, std::vector<double>& sum, std::vector<double>& dot);

// The arguments of the pass that writes the input's gradient, after reduce() by `first`, or without it. A smooth
// activation's derivative is expensive: where no precision is lost, the first pass leaves the gradient before the
// activation in memory that the second one has to write anyway (and first.grad_other is set). So it does where the
// first pass overwrites the gradient. exact: elements have the coefficients' precision. In norm.cpp.
NormArgs second_pass(NormArgs& first, bool reduces, bool exact);

}  // namespace tsmem::cpu
