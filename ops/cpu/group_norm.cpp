// The raw ops of group_norm + activation on the CPU, by the kernels of cpu/norm.h.
//
// A contiguous map is one of N x C channels, each of which lies in one row: whole groups that fit in a cache are a map
// for the kernels, whose passes run in one go. A channels_last one is N maps of rows: statistics of channels are put
// together to those of groups.
#include <cmath>
#include <map>
#include <mutex>

#include "act_table.h"
#include "cpu/norm.h"
#include "cpu/norm_map.h"
#include "raw_op.h"
#include "registration.h"

namespace tsmem {
namespace cpu {
namespace {

// A dense map in its layout, and its groups.
struct Grouped {
  Tensor x;
  bool rows = false;                       // channels_last, or one pixel
  int64_t images, channels, groups, each;  // each: a group's channels
  int64_t of_map;                          // groups that the kernels see at once

  Grouped(const Tensor& input, int64_t groups)
      : x(input.contiguous(group_format(input))),
        images(x.size(0)),
        channels(x.size(1)),
        groups(groups),
        each(channels / groups) {
    rows = x.suggest_memory_format() != at::MemoryFormat::Contiguous || x.numel() == images * channels;
    const int64_t group_bytes = std::max<int64_t>(1, x.numel() / (images * groups) * x.element_size());
    of_map = rows ? groups : std::clamp<int64_t>(kGroupBytes / group_bytes, 1, images * groups);
  }

  double count() const { return static_cast<double>(x.numel()) / static_cast<double>(images * groups); }

  // f(map, its first group, its groups) for each of the maps, whose elements are still to be set; each thread calls
  // start() before its first one and end(its first map, what start() returned) after its last.
  template <class Start, class F, class End>
  void for_each_map(const Act& act, Start start, F f, End end) const {
    const int64_t all = images * groups, maps = (all + of_map - 1) / of_map;
    // Made here, as autograd would see what the threads do to tensors.
    Map whole = rows ? Map(x.narrow(0, 0, 1), /*channels_last=*/true, act)
                     : Map(x.view({1, images * channels, x.numel() / (images * channels)}), false, act);
    whole.bytes = x.numel() * x.element_size();  // whether it's written past the caches
    // Where there are fewer images than threads these share one image's rows.
    const int64_t grain = (rows && images < at::get_num_threads()) || x.numel() < kSerial ? maps : 1;
    at::parallel_for(0, maps, grain, [&](int64_t from, int64_t to) {
      auto state = start();
      for (int64_t i = from; i < to; ++i) {
        const int64_t first = i * of_map, count = std::min(of_map, all - first);
        Map m = whole;
        if (!rows) m.args.channels = m.group = count * each, m.tasks = 1;
        f(m, first, count, state);
      }
      end(from, std::move(state));
    });
  }

  // Where the elements of the map that begins with this group are.
  template <class T>
  T* at_map(T* data, int64_t group) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    const int64_t bytes = x.numel() / (images * groups) * x.element_size();
    return data ? static_cast<T*>(static_cast<Byte*>(data) + group * bytes) : nullptr;
  }
};

struct Nothing {};

// Kernel arguments of a map's channels from its groups' statistics, which begin with the group `first`.
template <class A>
Coefficients<A> coefficients_of(const Map& m, const Grouped& g, const Vector<A>& weight, const Vector<A>& bias,
                                const A* mean, const A* invstd, int64_t first) {
  Coefficients<A> to(m);
  for (int64_t c = 0; c < m.args.channels; ++c) {
    const int64_t group = first + c / g.each, of_image = (first * g.each + c) % g.channels;
    to.set(c, mean[group], invstd[group], weight[of_image], bias[of_image]);
  }
  to.repeat(m);
  return to;
}

// Mean and sum of squared deviations of each group of a map.
void group_statistics(const Grouped& g, const Map& m, int64_t count, std::vector<double>& means,
                      std::vector<double>& m2s) {
  const NormKernels& kernels = norm_kernels();
  const NormArgs& a = m.args;
  const auto exact_too = [&](const NormArgs& of, int64_t c, double& mean, double& m2) {
    if (!std::isfinite(mean) || !std::isfinite(m2)) kernels.exact_stats(of, c, &mean, &m2);
  };
  if (a.planar()) {
    NormArgs whole = a;  // a group as one channel
    whole.channels = count, whole.inner = a.inner * g.each;
    kernels.stats(whole, {0, 1, 0, count}, means.data(), m2s.data());
    for (int64_t i = 0; i < count; ++i) exact_too(whole, i, means[i], m2s[i]);
    return;
  }
  std::vector<double> channel_means(a.channels), channel_m2s(a.channels);
  stats_of_all(m, channel_means, channel_m2s);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c) {
      exact_too(a, c, channel_means[c], channel_m2s[c]);
      means[i] += channel_means[c] / static_cast<double>(g.each);
    }
    for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c) {
      const double delta = channel_means[c] - means[i];
      m2s[i] += channel_m2s[c] + delta * delta * static_cast<double>(a.outer);
    }
  }
}

// act(pre) of all maps, from statistics that find(map, its first group, its groups) has written where they are not
// known.
template <class A, class Find>
void normalise(const Grouped& g, const OptTensor& weight_, const OptTensor& bias_, const A* mean, const A* invstd,
               const Act& act, void* out, Find find) {
  const Vector<A> weight(weight_, 1), bias(bias_, 0);
  g.for_each_map(
      act, [] { return Nothing(); },
      [&](Map& m, int64_t first, int64_t count, Nothing&) {
        NormArgs& a = m.args;
        a.x = g.at_map(g.x.const_data_ptr(), first);
        a.out = g.at_map(out, first);
        find(m, first, count);
        const Coefficients<A> coefficients = coefficients_of(m, g, weight, bias, mean, invstd, first);
        coefficients.use(a);
        m.parallel([&](int64_t, NormRange r) { norm_kernels().apply(m.writing(a), r); });
      },
      [](int64_t, Nothing) {});
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
    A *means = mean.mutable_data_ptr<A>(), *invstds = invstd.mutable_data_ptr<A>();
    normalise<A>(g, weight, bias, means, invstds, act, out.mutable_data_ptr(),
                 [&](const Map& m, int64_t first, int64_t count) {
                   std::vector<double> found(count), m2(count);
                   group_statistics(g, m, count, found, m2);
                   for (int64_t i = 0; i < count; ++i) {
                     means[first + i] = static_cast<A>(found[i]);
                     invstds[first + i] = static_cast<A>(1 / std::sqrt(m2[i] / g.count() + eps));
                   }
                 });
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
    normalise<A>(g, weight, bias, mean.const_data_ptr<A>(), invstd.const_data_ptr<A>(), act, out.mutable_data_ptr(),
                 [](const Map&, int64_t, int64_t) {});
  });
  return out;
}

// Sums over images, of each channel: of grad_pre, and of grad_pre * (x - mean) * invstd.
struct ChannelSums {
  std::vector<double> sum, dot;
};

// Of group g, whose channels have the weights w and the sums S of grad_pre and D of grad_pre * (x - mean):
//     grad x = w * invstd * grad_pre - ((x - mean) * invstd^3 * sum(w D) / n + invstd * sum(w S) / n)
// Returns the sums. grad_x: memory for the input's gradient, or null.
template <class A>
ChannelSums group_gradients(const Grouped& g, const Tensor& grad, const OptTensor& weight_, const OptTensor& bias_,
                            const A* mean, const A* invstd, const Act& act, void* grad_x) {
  const NormKernels& kernels = norm_kernels();
  const Vector<A> weight(weight_, 1), bias(bias_, 0);
  const auto zeros = [&] { return ChannelSums{std::vector<double>(g.channels), std::vector<double>(g.channels)}; };
  std::mutex mutex;
  std::map<int64_t, ChannelSums> parts;  // of the threads, which are added in order
  g.for_each_map(
      act, zeros,
      [&](Map& m, int64_t first, int64_t count, ChannelSums& total) {
        NormArgs& a = m.args;
        a.x = g.at_map(g.x.const_data_ptr(), first);
        a.grad = g.at_map(grad.const_data_ptr(), first);
        a.out = g.at_map(grad_x, first);
        const Coefficients<A> coefficients = coefficients_of(m, g, weight, bias, mean, invstd, first);
        coefficients.use(a);
        a.slope = a.scale;
        Table<A> tilt(m), level(m);
        a.tilt = tilt.values.data(), a.level = level.values.data();
        const NormArgs second = second_pass(a, true, sizeof(A) == grad.element_size());
        std::vector<double> sum(a.channels), dot(a.channels);
        if (a.planar())
          kernels.reduce(a, {0, 1, 0, a.channels}, sum.data(), dot.data());
        else
          sums_of_all(m, a, sum, dot);
        for (int64_t i = 0; i < count; ++i) {
          const double scale = static_cast<double>(invstd[first + i]), share = scale / g.count();
          double s = 0, d = 0;
          for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c) {
            const int64_t of_image = (first * g.each + c) % g.channels;
            const double w = static_cast<double>(weight[of_image]);
            s += w * sum[c], d += w * dot[c];
            total.sum[of_image] += sum[c];
            total.dot[of_image] += scale * dot[c];
          }
          for (int64_t c = i * g.each; c < (i + 1) * g.each; ++c)
            tilt[c] = static_cast<A>(scale * scale * d * share), level[c] = static_cast<A>(s * share);
        }
        tilt.repeat(m), level.repeat(m);
        if (grad_x) m.parallel([&](int64_t, NormRange r) { kernels.grad(m.writing(second), r); });
      },
      [&](int64_t from, ChannelSums total) {
        const std::lock_guard lock(mutex);
        parts.emplace(from, std::move(total));
      });
  ChannelSums all = zeros();
  for (const auto& [from, part] : parts)
    for (int64_t c = 0; c < g.channels; ++c) all.sum[c] += part.sum[c], all.dot[c] += part.dot[c];
  return all;
}

std::tuple<Tensor, Tensor, Tensor> group_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                      const OptTensor& weight, const OptTensor& bias,
                                                      const Tensor& mean, const Tensor& invstd, const Act& act,
                                                      std::array<bool, 3> want, bool overwrite) {
  const Grouped g(input, mean.numel() / input.size(0));
  const auto format = g.x.suggest_memory_format();
  const Tensor grad = grad_output.contiguous(format);
  const bool ours = overwrite || !grad.is_same(grad_output);  // a copy in this layout is
  Tensor grad_x, vectors[2];
  if (want[0]) grad_x = ours ? grad : at::empty_like(g.x, g.x.options(), format);
  with_acc(g.x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const ChannelSums sums =
        group_gradients<A>(g, grad, weight, bias, mean.const_data_ptr<A>(), invstd.const_data_ptr<A>(), act,
                           want[0] ? grad_x.mutable_data_ptr() : nullptr);
    for (int i : {0, 1}) {
      if (!want[1 + i]) continue;
      vectors[i] = at::empty({g.channels}, mean.options());
      const std::vector<double>& from = i == 0 ? sums.dot : sums.sum;
      std::transform(from.begin(), from.end(), vectors[i].mutable_data_ptr<A>(),
                     [](double v) { return static_cast<A>(v); });
    }
  });
  return {grad_x, vectors[0], vectors[1]};
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
