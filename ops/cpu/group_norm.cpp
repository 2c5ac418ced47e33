// The raw ops of group_norm + activation on the CPU, by the kernels of cpu/norm.h.
//
// A contiguous map is one of N x C channels, each of which lies in one row: both passes of a group run in one go. A
// channels_last one is N maps of rows: statistics of channels are put together to those of groups.
#include <cmath>

#include "act_table.h"
#include "cpu/norm.h"
#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

// A dense map in its layout, its groups, and the number of `each` group's channels.
struct Grouped {
  Tensor x;
  bool rows = false;  // channels_last, or one pixel
  int64_t images, channels, groups, each;

  Grouped(const Tensor& input, int64_t groups)
      : x(input.contiguous(group_format(input))),
        images(x.size(0)),
        channels(x.size(1)),
        groups(groups),
        each(channels / groups) {
    rows = x.suggest_memory_format() != at::MemoryFormat::Contiguous || x.numel() == images * channels;
  }
  int64_t image_bytes() const { return x.numel() / images * x.element_size(); }
  double count() const { return static_cast<double>(x.numel()) / static_cast<double>(images * groups); }

  // The map that the kernels see: of all images (contiguous), or of one, whose elements are still to be set. Its tasks
  // are whole groups, or parts of all of a row's channels.
  Map map(const Act& act) const {
    if (rows) return Map(x.narrow(0, 0, 1), /*channels_last=*/true, act);
    Map m(x.view({1, images * channels, x.numel() / (images * channels)}), false, act);
    m.group = (m.group + each - 1) / each * each;
    m.tasks = (m.args.channels + m.group - 1) / m.group;
    return m;
  }

  // f(map, its first group) for each of the maps; f sees a map's own arguments.
  template <class F>
  void for_each_map(const Act& act, F f) const {
    if (!rows) {
      Map m = map(act);
      f(m, 0);
      return;
    }
    // The threads share the images or, where there are fewer of these, one image's rows.
    at::parallel_for(0, images, images >= at::get_num_threads() ? 1 : images, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        Map m = map(act);
        f(m, n * groups);
      }
    });
  }

  // Where the elements of the map that begins with this group are.
  template <class T>
  T* at_map(T* data, int64_t group) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return data ? static_cast<T*>(static_cast<Byte*>(data) + group / groups * image_bytes()) : nullptr;
  }
};

// Kernel arguments of a map's channels, from its groups' statistics.
template <class A>
struct GroupCoefficients {
  Coefficients<A> of_channels;
  const Vector<A>&weight, &bias;
  int64_t each, channels;
  GroupCoefficients(const Map& m, const Grouped& g, const Vector<A>& weight, const Vector<A>& bias)
      : of_channels(m), weight(weight), bias(bias), each(g.each), channels(g.channels) {}
  void set(int64_t group, A mean, A invstd) {
    for (int64_t c = group * each; c < (group + 1) * each; ++c)
      of_channels.set(c, mean, invstd, weight[c % channels], bias[c % channels]);
  }
};

// act(pre) of all maps; mean and inverse deviation of each group are found, or known.
template <class A>
void normalise(const Grouped& g, const OptTensor& weight_, const OptTensor& bias_, std::optional<double> eps, A* mean,
               A* invstd, const Act& act, void* out) {
  const NormKernels& kernels = norm_kernels();
  const Vector<A> weight(weight_, 1), bias(bias_, 0);
  g.for_each_map(act, [&](Map& m, int64_t first) {
    NormArgs& a = m.args;
    a.x = g.at_map(g.x.const_data_ptr(), first);
    a.out = g.at_map(out, first);
    GroupCoefficients<A> coefficients(m, g, weight, bias);
    coefficients.of_channels.use(a);
    const auto finish = [&](int64_t group, double group_mean, double m2) {
      mean[first + group] = static_cast<A>(group_mean);
      invstd[first + group] = static_cast<A>(1 / std::sqrt(m2 / g.count() + *eps));
    };
    if (a.planar()) {
      NormArgs whole = a;  // a group as one channel
      whole.channels = a.channels / g.each, whole.inner = a.inner * g.each;
      m.parallel([&](int64_t, NormRange r) {
        const int64_t g0 = r.c0 / g.each, g1 = r.c1 / g.each;
        if (eps) {
          std::vector<double> means(g1 - g0), m2s(g1 - g0);
          kernels.stats(whole, {0, 1, g0, g1}, means.data(), m2s.data());
          for (int64_t i = 0; i < g1 - g0; ++i) {
            if (!std::isfinite(means[i]) || !std::isfinite(m2s[i]))
              kernels.exact_stats(whole, g0 + i, &means[i], &m2s[i]);
            finish(g0 + i, means[i], m2s[i]);
          }
        }
        for (int64_t i = g0; i < g1; ++i) coefficients.set(i, mean[i], invstd[i]);
        kernels.apply(m.writing(a), r);
      });
      return;
    }
    if (eps) {
      std::vector<double> means(a.channels), m2s(a.channels);
      stats_of_all(m, means, m2s);
      for (int64_t i = 0; i < g.groups; ++i) {
        double group_mean = 0, m2 = 0;
        for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c) {
          if (!std::isfinite(means[c]) || !std::isfinite(m2s[c])) kernels.exact_stats(a, c, &means[c], &m2s[c]);
          group_mean += means[c] / static_cast<double>(g.each);
        }
        for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c) {
          const double delta = means[c] - group_mean;
          m2 += m2s[c] + delta * delta * static_cast<double>(a.outer);
        }
        finish(i, group_mean, m2);
      }
    }
    for (int64_t i = 0; i < g.groups; ++i) coefficients.set(i, mean[first + i], invstd[first + i]);
    coefficients.of_channels.repeat(m);
    m.parallel([&](int64_t, NormRange r) { kernels.apply(m.writing(a), r); });
  });
}

std::tuple<Tensor, Tensor, Tensor> group_forward_cpu(const Tensor& input, const OptTensor& weight,
                                                     const OptTensor& bias, int64_t groups, double eps,
                                                     const Act& act) {
  const Grouped g(input, groups);
  Tensor out = at::empty_like(g.x, g.x.options(), g.x.suggest_memory_format());
  const auto options = g.x.options().dtype(acc_type(g.x.scalar_type()));
  Tensor mean = at::empty({g.images * groups}, options), invstd = at::empty({g.images * groups}, options);
  with_acc(g.x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    normalise<A>(g, weight, bias, eps, mean.mutable_data_ptr<A>(), invstd.mutable_data_ptr<A>(), act,
                 out.mutable_data_ptr());
  });
  return {out, mean, invstd};
}

Tensor group_apply_cpu(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                       const Tensor& invstd, const Act& act, const OptTensor& out_memory) {
  const Grouped g(input, mean.numel() / input.size(0));
  const bool reuse = out_memory && out_memory->strides() == g.x.strides();
  Tensor out = reuse ? *out_memory : at::empty_like(g.x, g.x.options(), g.x.suggest_memory_format());
  with_acc(g.x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    // They are read alone, where they are known.
    normalise<A>(g, weight, bias, {}, const_cast<A*>(mean.const_data_ptr<A>()),
                 const_cast<A*>(invstd.const_data_ptr<A>()), act, out.mutable_data_ptr());
  });
  return out;
}

// Of group g, whose channels have the weights w and the sums S of grad_pre and D of grad_pre * (x - mean):
//     grad x = w * invstd * grad_pre - ((x - mean) * invstd^3 * sum(w D) / n + invstd * sum(w S) / n)
template <class A>
void group_gradients(const Grouped& g, const Tensor& grad, const OptTensor& weight_, const OptTensor& bias_,
                     const A* mean, const A* invstd, const Act& act, std::array<bool, 3> want,
                     std::array<Tensor, 3>& to) {
  const NormKernels& kernels = norm_kernels();
  const Vector<A> weight(weight_, 1), bias(bias_, 0);
  // Of each image's channels.
  std::vector<double> sum(g.images * g.channels), dot(g.images * g.channels);
  g.for_each_map(act, [&](Map& m, int64_t first) {
    NormArgs& a = m.args;
    a.x = g.at_map(g.x.const_data_ptr(), first);
    a.grad = g.at_map(grad.const_data_ptr(), first);
    if (want[0]) a.out = g.at_map(to[0].mutable_data_ptr(), first);
    GroupCoefficients<A> coefficients(m, g, weight, bias);
    for (int64_t i = 0; i < a.channels / g.each; ++i) coefficients.set(i, mean[first + i], invstd[first + i]);
    coefficients.of_channels.repeat(m);
    coefficients.of_channels.use(a);
    a.slope = a.scale;
    Table<A> tilt(m), level(m);
    a.tilt = tilt.values.data(), a.level = level.values.data();
    const NormArgs second = second_pass(a, true, sizeof(A) == grad.element_size());
    double *sums = &sum[first * g.each], *dots = &dot[first * g.each];
    const auto finish = [&](int64_t group) {
      double s = 0, d = 0;
      for (int64_t c = group * g.each; c < (group + 1) * g.each; ++c) {
        const double w = static_cast<double>(weight[c % g.channels]);
        s += w * sums[c], d += w * dots[c];
      }
      const double scale = static_cast<double>(invstd[first + group]), share = scale / g.count();
      for (int64_t c = group * g.each; c < (group + 1) * g.each; ++c) {
        tilt[c] = static_cast<A>(scale * scale * d * share);
        level[c] = static_cast<A>(s * share);
        dots[c] *= scale;
      }
    };
    if (a.planar()) {
      m.parallel([&](int64_t, NormRange r) {
        kernels.reduce(a, r, sums + r.c0, dots + r.c0);
        for (int64_t i = r.c0 / g.each; i < r.c1 / g.each; ++i) finish(i);
        if (want[0]) kernels.grad(m.writing(second), r);
      });
      return;
    }
    std::vector<double> row_sum(a.channels), row_dot(a.channels);
    sums_of_all(m, a, row_sum, row_dot);
    std::copy(row_sum.begin(), row_sum.end(), sums);
    std::copy(row_dot.begin(), row_dot.end(), dots);
    for (int64_t i = 0; i < g.groups; ++i) finish(i);
    tilt.repeat(m), level.repeat(m);
    if (want[0]) m.parallel([&](int64_t, NormRange r) { kernels.grad(m.writing(second), r); });
  });
  for (int i : {1, 2}) {
    if (!want[i]) continue;
    const std::vector<double>& of_images = i == 1 ? dot : sum;
    A* total = to[i].template mutable_data_ptr<A>();
    for (int64_t c = 0; c < g.channels; ++c) {
      double all = 0;
      for (int64_t n = 0; n < g.images; ++n) all += of_images[n * g.channels + c];
      total[c] = static_cast<A>(all);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> group_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                      const OptTensor& weight, const OptTensor& bias,
                                                      const Tensor& mean, const Tensor& invstd, const Act& act,
                                                      std::array<bool, 3> want, bool overwrite) {
  const Grouped g(input, mean.numel() / input.size(0));
  const auto format = g.x.suggest_memory_format();
  const Tensor grad = grad_output.contiguous(format);
  std::array<Tensor, 3> to;
  if (want[0]) to[0] = overwrite && grad.is_same(grad_output) ? grad : at::empty_like(g.x, g.x.options(), format);
  for (int i : {1, 2})
    if (want[i]) to[i] = at::empty({g.channels}, mean.options());
  with_acc(g.x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    group_gradients<A>(g, grad, weight, bias, mean.const_data_ptr<A>(), invstd.const_data_ptr<A>(), act, want, to);
  });
  return {to[0], to[1], to[2]};
}

}  // namespace
}  // namespace cpu

void register_group_norm_cpu(torch::Library& m) {
  using namespace cpu;
  m.impl("_group_norm_act_forward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&group_forward_cpu>::call)));
  m.impl("_group_norm_act_apply", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&group_apply_cpu>::call)));
  m.impl("_group_norm_act_backward", c10::DispatchKey::CPU, TORCH_FN((FromSchema<&group_backward_cpu>::call)));
}

}  // namespace tsmem
