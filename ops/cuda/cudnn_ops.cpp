// tsmem::_norm_relu_conv and _norm_relu_conv_weight_gradient on a CUDA device, by cuDNN's fused graphs
// (cudnn_plans.h). They return an undefined tensor where there is no such graph, or PyTorch's way is the faster one.
//
// Which way is faster is measured, so that runs may differ in their last bits: as with
// torch.backends.cudnn.benchmark, which has to be on for this. TSMEM_CUDNN=0 in the environment turns it off, 1 on
// whatever that flag says. Deterministic runs never take it.
#include <ATen/Context.h>

#include <cstdlib>
#include <map>

#include "common.h"
#include "cuda/affine.h"
#include "cuda/cudnn_plans.h"
#include "cuda/device.h"
#include "cuda/raw_ops.h"
#include "cuda/trial.h"
#include "raw_op.h"
#ifndef TSMEM_EMULATE_CUDA
#include <ATen/cudnn/Handle.h>
#endif

namespace tsmem::cuda {
namespace {

using at::IntArrayRef;
using at::Tensor;

struct Norm {
  const Tensor& x;
  const OptTensor &weight, &bias;
  const Tensor &mean, &invstd;
};

// A graph for one shape on one device: cuDNN's plan, and where the kernel says that its coefficients lose too much.
struct Fused {
  FusedPlanPtr plan;  // null: cuDNN has none
  Tensor lossy;       // int32 in the host's memory, which the device writes to
};

bool wanted() {
  const char* const set = std::getenv("TSMEM_CUDNN");
  const auto& context = at::globalContext();
  if (context.deterministicCuDNN() || context.deterministicAlgorithms() || !context.userEnabledCuDNN()) return false;
  return set && *set ? std::string(set) != "0" : context.benchmarkCuDNN();
}

bool dense_channels_last(const Tensor& t) { return t.is_contiguous(at::MemoryFormat::ChannelsLast); }

// What cuDNN's engines take of these: 16 bits, channels innermost, eight of them in a row at a multiple of 16 bytes.
bool takes(const Tensor& x, const Tensor& other, IntArrayRef weight_sizes) {
  const auto dtype = x.scalar_type();
  return wanted() && (dtype == at::kHalf || dtype == at::kBFloat16) && other.scalar_type() == dtype && x.dim() == 4 &&
         x.numel() > 0 && other.numel() > 0 && dense_channels_last(x) && dense_channels_last(other) &&
         weight_sizes[0] % 8 == 0 && weight_sizes[1] % 8 == 0 && weight_sizes[1] == x.size(1) && aligned({x, other});
}

TrialKey key_of(FusedGraph graph, const FusedConv& conv, const Tensor& x) {
  const Computed what = graph == FusedGraph::convolution ? Computed::convolution : Computed::weight_gradient;
  TrialKey key{static_cast<int64_t>(what), x.get_device(), static_cast<int64_t>(conv.dtype)};
  for (const auto* list : {&conv.input, &conv.weight, &conv.stride, &conv.padding, &conv.dilation})
    key.insert(key.end(), list->begin(), list->end());
  return key;
}

std::string name_of(FusedGraph graph, const FusedConv& conv, const Tensor& x) {
  return c10::str(graph == FusedGraph::convolution ? "convolution" : "gradient of a convolution's weight",
                  " of relu(batch_norm) on ", x.device(), ": ", x.scalar_type(), ", input ", IntArrayRef(conv.input),
                  ", weight ", IntArrayRef(conv.weight), ", stride ", IntArrayRef(conv.stride), ", padding ",
                  IntArrayRef(conv.padding), ", dilation ", IntArrayRef(conv.dilation));
}

#ifdef TSMEM_EMULATE_CUDA
Fused make_fused(FusedGraph, const FusedConv&, const Tensor&, const TrialKey&) {
  return {nullptr, at::zeros({1}, at::kInt)};
}
bool has_plan(const Fused&) { return true; }
// The graph's operations one by one, in float.
Tensor run(const Fused&, FusedGraph graph, const FusedConv& conv, const Tensor& x, const Tensor& scale,
           const Tensor& shift, const Tensor& other) {
  const auto of_channels = [](const Tensor& t) { return t.to(at::kFloat).view({1, -1, 1, 1}); };
  const Tensor a = at::relu(x.to(at::kFloat) * of_channels(scale) + of_channels(shift));
  const IntArrayRef stride = conv.stride, padding = conv.padding, dilation = conv.dilation;
  const std::vector<int64_t> none(stride.size(), 0);
  const Tensor result =
      graph == FusedGraph::convolution
          ? at::convolution(a, other.to(at::kFloat), {}, stride, padding, dilation, false, none, 1)
          : std::get<1>(at::convolution_backward(other.to(at::kFloat), a, at::empty(conv.weight, a.options()), {},
                                                 stride, padding, dilation, false, none, 1, {false, true, false}));
  return result.to(x.scalar_type(), false, false, at::MemoryFormat::ChannelsLast);
}
#else
bool has_plan(const Fused& fused) { return fused.plan != nullptr; }

// Builds the plan, which takes milliseconds; what cuDNN answers where it has none is noted among the trials.
Fused make_fused(FusedGraph graph, const FusedConv& conv, const Tensor& x, const TrialKey& key) {
  std::string why = load_cudnn("libcudnn.so.9");
  Fused fused;
  if (why.empty()) fused.plan = build_plan(graph, conv, {at::native::getCudnnHandle(), "", 0}, why);
  if (!fused.plan) {
    give_up_fused(key, name_of(graph, conv, x), why);
    return fused;
  }
  fused.lossy = at::zeros({1}, at::TensorOptions(at::kInt).pinned_memory(true));
  return fused;
}

Tensor run(const Fused& fused, FusedGraph graph, const FusedConv& conv, const Tensor& x, const Tensor& scale,
           const Tensor& shift, const Tensor& other) {
  const bool forward = graph == FusedGraph::convolution;
  const auto format = at::MemoryFormat::ChannelsLast;
  Tensor result = at::empty(forward ? conv.output : conv.weight, x.options(), format);
  const Tensor workspace = at::empty({workspace_bytes(*fused.plan)}, x.options().dtype(at::kByte));
  const Tensor sums = forward ? at::empty({2, conv.weight[0]}, x.options().dtype(at::kFloat)) : Tensor();
  FusedOperands operands;
  operands.x = read(x), operands.scale = read(scale), operands.shift = read(shift), operands.other = read(other);
  operands.result = write(result);
  operands.workspace = write(workspace);
  if (forward)
    for (int i : {0, 1}) operands.sums[i] = sums[i].mutable_data_ptr<float>();
  const std::string failed = run_plan(*fused.plan, at::native::getCudnnHandle(), operands);
  TORCH_CHECK(failed.empty(), "tsmem: cuDNN's ", engine_name(*fused.plan), " failed: ", failed);
  return result;
}
#endif

// The plans so far. Never while a graph is captured for a new one.
std::optional<Fused> fused_for(FusedGraph graph, const FusedConv& conv, const Tensor& x, const TrialKey& key) {
  static std::mutex mutex;
  static auto& all = *new std::map<TrialKey, Fused>;  // outlives what CUDA takes down as the process ends
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto known = all.find(key); known != all.end()) return known->second;
  if (is_capturing()) return std::nullopt;
  return all.emplace(key, make_fused(graph, conv, x, key)).first->second;
}

bool is_lossy(const Fused& fused) {
  return *static_cast<const volatile int32_t*>(fused.lossy.const_data_ptr<int32_t>()) != 0;
}

Tensor run_fused(const Fused& fused, FusedGraph graph, const FusedConv& conv, const Norm& norm, const Tensor& other,
                 Stream stream) {
  Tensor scale = at::empty({norm.x.size(1)}, norm.x.options()), shift = at::empty_like(scale);
  AffineArgs args;
  args.dtype = cpu_dtype(norm.x.scalar_type());
  args.channels = norm.x.size(1);
  args.mean = norm.mean.const_data_ptr<float>();
  args.invstd = norm.invstd.const_data_ptr<float>();
  args.weight = numbers(norm.weight);
  args.bias = numbers(norm.bias);
  args.scale = write(scale);
  args.shift = write(shift);
  args.lossy = const_cast<int32_t*>(fused.lossy.const_data_ptr<int32_t>());
  affine(args, stream);
  return run(fused, graph, conv, norm.x, scale, shift, other);
}

// Norm-wise, to a few roundings of the dtype; nothing can be said of results that are not finite.
std::optional<bool> alike(const Tensor& plain, const Tensor& fused) {
  const Tensor a = plain.to(at::kFloat), size = a.norm();
  if (!std::isfinite(size.item<float>())) return std::nullopt;
  const double rounding = plain.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-9;
  return (fused.to(at::kFloat) - a).norm().item<double>() <= 8 * rounding * size.item<double>();
}

using ApplyOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                             const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out)>;
Tensor activation(const Norm& norm) {
  static const ApplyOp op("tsmem::_batch_norm_act_apply");
  return op(norm.x, norm.weight, norm.bias, norm.mean, norm.invstd, {}, Act{ActKind::relu}, {});
}

// Of a convolution of four dimensions.
std::vector<int64_t> output_sizes(const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                  IntArrayRef dilation) {
  std::vector<int64_t> sizes{input.size(0), weight.size(0)};
  for (int64_t d : {0, 1})
    sizes.push_back((input.size(d + 2) + 2 * padding[d] - dilation[d] * (weight.size(d + 2) - 1) - 1) / stride[d] + 1);
  return sizes;
}

// By the graph where that is the faster way, else nothing. plain(): the same as PyTorch computes it.
template <class Plain>
Tensor by_graph(FusedGraph graph, const FusedConv& conv, const Norm& norm, const Tensor& other, const Plain& plain) {
  const OnDevice on(norm.x);
  const TrialKey key = key_of(graph, conv, norm.x);
  const auto name = [&] { return name_of(graph, conv, norm.x); };
  if (known_to_take_fused(key) == false) return {};
  const auto fused = fused_for(graph, conv, norm.x, key);
  if (!fused || !has_plan(*fused)) return {};
  if (is_lossy(*fused)) {
    give_up_fused(key, name(), "the norm's coefficients lose too much in 16 bits");
    return {};
  }
  const auto run = [&] { return run_fused(*fused, graph, conv, norm, other, on.stream); };
  return takes_fused(key, name, plain, run, alike) && !is_lossy(*fused) ? run() : Tensor();
}

Tensor norm_relu_conv_op(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                         const Tensor& invstd, const Tensor& conv_weight, IntArrayRef stride, IntArrayRef padding,
                         IntArrayRef dilation) {
  if (conv_weight.dim() != 4 || !takes(input, conv_weight, conv_weight.sizes())) return {};
  const FusedConv conv{cpu_dtype(input.scalar_type()),
                       input.sizes().vec(),
                       conv_weight.sizes().vec(),
                       output_sizes(input, conv_weight, stride, padding, dilation),
                       stride.vec(),
                       padding.vec(),
                       dilation.vec()};
  const Norm norm{input, weight, bias, mean, invstd};
  return by_graph(FusedGraph::convolution, conv, norm, conv_weight, [&] {
    return at::convolution(activation(norm), conv_weight, {}, stride, padding, dilation, false, {0, 0}, 1);
  });
}

Tensor norm_relu_conv_weight_gradient_op(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                         const Tensor& mean, const Tensor& invstd, const Tensor& given_grad,
                                         IntArrayRef weight_sizes, IntArrayRef stride, IntArrayRef padding,
                                         IntArrayRef dilation) {
  // As at::convolution_backward does.
  const Tensor grad = given_grad.dim() == 4 ? given_grad.contiguous(at::MemoryFormat::ChannelsLast) : given_grad;
  if (weight_sizes.size() != 4 || !takes(input, grad, weight_sizes)) return {};
  const FusedConv conv{cpu_dtype(input.scalar_type()),
                       input.sizes().vec(),
                       weight_sizes.vec(),
                       grad.sizes().vec(),
                       stride.vec(),
                       padding.vec(),
                       dilation.vec()};
  const Norm norm{input, weight, bias, mean, invstd};
  return by_graph(FusedGraph::weight_gradient, conv, norm, grad, [&] {
    const Tensor shape = at::empty(weight_sizes, input.options(), at::MemoryFormat::ChannelsLast);
    return std::get<1>(at::convolution_backward(grad, activation(norm), shape, {}, stride, padding, dilation, false,
                                                {0, 0}, 1, {false, true, false}));
  });
}

}  // namespace

void implement_cudnn(torch::Library& m) {
  m.impl("_norm_relu_conv", TORCH_FN(norm_relu_conv_op));
  m.impl("_norm_relu_conv_weight_gradient", TORCH_FN(norm_relu_conv_weight_gradient_op));
}

}  // namespace tsmem::cuda
