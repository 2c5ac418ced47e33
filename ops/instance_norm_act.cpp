// instance_norm + activation: a batch norm over the N x C channels of one image, as ATen's own is (at::instance_norm in
// ATen/native/Normalization.cpp), by batch_norm_act and so with what that keeps: the input, two statistics a channel.

#include "norm_ops.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

OptTensor repeated(const OptTensor& t, int64_t times) { return t ? OptTensor(t->repeat(times)) : OptTensor(); }

// input: [N, C, *]. Running statistics, where there are any, get the mean of the images' new ones, as PyTorch's do.
Tensor instance_norm_act(const Tensor& input, const OptTensor& weight_, const OptTensor& bias_,
                         const OptTensor& running_mean_, const OptTensor& running_var_, bool use_input_stats,
                         double momentum, double eps, bool cudnn_enabled, c10::string_view name,
                         at::ArrayRef<double> args, int64_t recompute) {
  const OptTensor weight = defined(weight_), bias = defined(bias_), running_mean = defined(running_mean_),
                  running_var = defined(running_var_);
  const auto per_channel = [&](const OptTensor& t) { return !t || (t->dim() == 1 && t->size(0) == input.size(1)); };
  const Act act = parse_act(name, args);
  if (input.dim() < 2 || input.numel() == 0 || (!use_input_stats && !(running_mean && running_var)) ||
      !per_channel(weight) || !per_channel(bias) || !per_channel(running_mean) || !per_channel(running_var))
    return aten_act(at::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
                                      cudnn_enabled),
                    act);
  const int64_t images = input.size(0), channels = input.size(1);
  std::vector<int64_t> one_image = input.sizes().vec();
  one_image[0] = 1, one_image[1] = images * channels;
  // PyTorch casts what it repeats: what is copied back below is cast again.
  const auto dtype = weight ? weight->scalar_type() : input.scalar_type();
  const auto statistics = [&](const OptTensor& t) { return t ? OptTensor(repeated(t, images)->to(dtype)) : t; };
  const OptTensor mean = statistics(running_mean), var = statistics(running_var);
  const Tensor out =
      batch_norm_act(input.contiguous().view(one_image),
                     {repeated(weight, images), repeated(bias, images), mean, var, use_input_stats, momentum, eps},
                     cudnn_enabled, act, recompute);
  if (use_input_stats) {
    at::NoGradGuard no_grad;
    // Both or none, where memory runs out.
    const auto over_images = [&](const OptTensor& t) { return t ? t->view({images, channels}).mean(0) : Tensor(); };
    const Tensor new_mean = over_images(mean), new_var = over_images(var);
    if (running_mean) Tensor(*running_mean).copy_(new_mean);
    if (running_var) Tensor(*running_var).copy_(new_var);
  }
  return out.view(input.sizes());
}

}  // namespace

void register_instance_norm_act(torch::Library& m) {
  m.def(
      "instance_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? "
      "running_var, bool use_input_stats, float momentum, float eps, bool cudnn_enabled, str act, float[] act_args, "
      "int recompute=0) -> Tensor",
      TORCH_FN(instance_norm_act));
}

}  // namespace tsmem
