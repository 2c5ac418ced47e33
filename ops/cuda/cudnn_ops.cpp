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

// What cuDNN's engines take: 16 bits, and channels in eights.
bool takes(at::ScalarType dtype, IntArrayRef input_sizes, IntArrayRef weight_sizes) {
  return (dtype == at::kHalf || dtype == at::kBFloat16) && input_sizes.size() == 4 && weight_sizes.size() == 4 &&
         c10::multiply_integers(input_sizes) > 0 && c10::multiply_integers(weight_sizes) > 0 &&
         weight_sizes[0] % 8 == 0 && weight_sizes[1] % 8 == 0 && weight_sizes[1] == input_sizes[1];
}
// ... of tensors whose channels are innermost, eight of them in a row at a multiple of 16 bytes.
bool takes(const Tensor& x, const Tensor& other, IntArrayRef weight_sizes) {
  return takes(x.scalar_type(), x.sizes(), weight_sizes) && other.scalar_type() == x.scalar_type() &&
         other.numel() > 0 && dense_channels_last(x) && dense_channels_last(other) && aligned({x, other});
}

FusedGraph graph_of(bool weight_gradient) {
  return weight_gradient ? FusedGraph::weight_gradient : FusedGraph::convolution;
}

TrialKey key_of(FusedGraph graph, const FusedConv& conv, const Tensor& like) {
  const Computed what = graph == FusedGraph::convolution ? Computed::convolution : Computed::weight_gradient;
  TrialKey key{{static_cast<int64_t>(what), like.get_device(), static_cast<int64_t>(conv.dtype)}, conv.input};
  for (const auto* list : {&conv.weight, &conv.stride, &conv.padding, &conv.dilation})
    key.layer.insert(key.layer.end(), list->begin(), list->end());
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

// The plans so far.
Fused fused_for(FusedGraph graph, const FusedConv& conv, const Tensor& x, const TrialKey& key) {
  static std::mutex mutex;
  static auto& all = *new std::map<TrialKey, Fused>;  // outlives what CUDA takes down as the process ends
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto known = all.find(key); known != all.end()) return known->second;
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

// Norm-wise, to a few roundings of the dtype, of its smallest numbers too; nothing can be said of results that are all
// zeros or not finite.
std::optional<bool> alike(const Tensor& plain, const Tensor& fused) {
  const Tensor a = plain.to(at::kFloat);
  const double size = a.norm().item<double>();
  if (!std::isfinite(size) || size == 0) return std::nullopt;
  const bool half = plain.scalar_type() == at::kHalf;
  const double rounding = half ? 0x1p-11 : 0x1p-9, smallest = half ? 0x1p-24 : 0x1p-133;
  return (fused.to(at::kFloat) - a).norm().item<double>() <=
         8 * rounding * size + smallest * std::sqrt(static_cast<double>(plain.numel()));
}

using ApplyOp = RawOp<Tensor(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                             const Tensor& invstd, const OptTensor& other, const Act& act, const OptTensor& out)>;
Tensor activation(const Norm& norm) {
  static const ApplyOp op("tsmem::_batch_norm_act_apply");
  return op(norm.x, norm.weight, norm.bias, norm.mean, norm.invstd, {}, Act{ActKind::relu}, {});
}

// Of a convolution of four dimensions.
std::vector<int64_t> output_sizes(IntArrayRef input, IntArrayRef weight, IntArrayRef stride, IntArrayRef padding,
                                  IntArrayRef dilation) {
  std::vector<int64_t> sizes{input[0], weight[0]};
  for (int64_t d : {0, 1})
    sizes.push_back((input[d + 2] + 2 * padding[d] - dilation[d] * (weight[d + 2] - 1) - 1) / stride[d] + 1);
  return sizes;
}

// Whether the graph may be taken. Not while a CUDA graph is captured: its replays would not look whether the
// coefficients still fit.
bool may_take(FusedGraph graph, const FusedConv& conv, const Tensor& like) {
  return wanted() && !is_capturing() && known_to_take_fused(key_of(graph, conv, like)) != false;
}

// By the graph where that is the faster way, else nothing. plain(): the same as PyTorch computes it.
template <class Plain>
Tensor by_graph(FusedGraph graph, const FusedConv& conv, const Norm& norm, const Tensor& other, const Plain& plain) {
  const OnDevice on(norm.x);
  if (!may_take(graph, conv, norm.x)) return {};
  const TrialKey key = key_of(graph, conv, norm.x);
  const auto name = [&] { return name_of(graph, conv, norm.x); };
  try {
    const Fused fused = fused_for(graph, conv, norm.x, key);
    if (!has_plan(fused)) return {};
    const auto run = [&] { return run_fused(fused, graph, conv, norm, other, on.stream); };
    if (!is_lossy(fused) && !takes_fused(key, name, plain, run, alike)) return {};
    if (!is_lossy(fused)) return run();
    give_up_fused(key, name(), "the norm's coefficients lose too much in 16 bits");
  } catch (const c10::Error& e) {
    give_up_fused(key, name(), why_failed(e));
  }
  return {};
}

FusedConv conv_of(const Tensor& like, IntArrayRef input_sizes, IntArrayRef weight_sizes, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation) {
  return {cpu_dtype(like.scalar_type()),
          input_sizes.vec(),
          weight_sizes.vec(),
          output_sizes(input_sizes, weight_sizes, stride, padding, dilation),
          stride.vec(),
          padding.vec(),
          dilation.vec()};
}

bool may_take_op(const Tensor& like, IntArrayRef input_sizes, IntArrayRef input_strides, IntArrayRef weight_sizes,
                 IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool weight_gradient) {
  const OnDevice on(like);
  return takes(like.scalar_type(), input_sizes, weight_sizes) &&
         c10::is_channels_last_strides_2d(input_sizes, input_strides) &&
         may_take(graph_of(weight_gradient), conv_of(like, input_sizes, weight_sizes, stride, padding, dilation), like);
}

Tensor norm_relu_conv_op(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                         const Tensor& invstd, const Tensor& conv_weight, IntArrayRef stride, IntArrayRef padding,
                         IntArrayRef dilation) {
  if (!takes(input, conv_weight, conv_weight.sizes())) return {};
  const FusedConv conv = conv_of(input, input.sizes(), conv_weight.sizes(), stride, padding, dilation);
  const Norm norm{input, weight, bias, mean, invstd};
  return by_graph(FusedGraph::convolution, conv, norm, conv_weight, [&] {
    return at::convolution(activation(norm), conv_weight, {}, stride, padding, dilation, false, {0, 0}, 1);
  });
}

Tensor norm_relu_conv_weight_gradient_op(const Tensor& input, const OptTensor& weight, const OptTensor& bias,
                                         const Tensor& mean, const Tensor& invstd, const Tensor& given_grad,
                                         IntArrayRef weight_sizes, IntArrayRef stride, IntArrayRef padding,
                                         IntArrayRef dilation) {
  if (!takes(input.scalar_type(), input.sizes(), weight_sizes)) return {};
  const Tensor grad = given_grad.contiguous(at::MemoryFormat::ChannelsLast);  // as at::convolution_backward does
  if (!takes(input, grad, weight_sizes)) return {};
  const FusedConv conv = conv_of(input, input.sizes(), weight_sizes, stride, padding, dilation);
  const Norm norm{input, weight, bias, mean, invstd};
  return by_graph(FusedGraph::weight_gradient, conv, norm, grad, [&] {
    const Tensor shape = at::empty(weight_sizes, input.options(), at::MemoryFormat::ChannelsLast);
    return std::get<1>(at::convolution_backward(grad, activation(norm), shape, {}, stride, padding, dilation, false,
                                                {0, 0}, 1, {false, true, false}));
  });
}

}  // namespace

void implement_cudnn(torch::Library& m) {
  m.impl("_may_take_norm_relu_conv", TORCH_FN(may_take_op));
  m.impl("_norm_relu_conv", TORCH_FN(norm_relu_conv_op));
  m.impl("_norm_relu_conv_weight_gradient", TORCH_FN(norm_relu_conv_weight_gradient_op));
}

}  // namespace tsmem::cuda
