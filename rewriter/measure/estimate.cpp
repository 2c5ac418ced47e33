#include "rewriter/measure/estimate.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

// Blocks of a size and no memory. Their address is that of what holds the size, so that each is told from the others.
struct CountingAllocator : c10::Allocator {
  static void free(void* block) {
    auto* size = static_cast<int64_t*>(block);
    c10::reportMemoryUsageToProfiler(block, -*size, 0, 0, c10::Device(c10::kMeta));
    delete size;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* size = new int64_t(static_cast<int64_t>(bytes));
    c10::reportMemoryUsageToProfiler(size, *size, 0, 0, c10::Device(c10::kMeta));
    return {nullptr, size, &free, c10::Device(c10::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, std::size_t) const override {}
};

Tensor like_sizes(IntArrayRef sizes, const Tensor& t, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return at::empty(sizes, t.options(), format);
}

bool blocked(const Tensor& t) {
  return (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf) &&
         t.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

// How many channels are together in oneDNN's layouts.
int64_t channels_of_a_block() {
#ifdef __x86_64__
  static const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  return wide ? 16 : 8;
#else
  return 16;
#endif
}

// A copy in oneDNN's layout, which fills the last block up.
Tensor in_blocks(IntArrayRef sizes, const Tensor& t) {
  auto padded = sizes.vec();
  const int64_t block = channels_of_a_block();
  if (padded.size() > 1 && padded[1] > 3) padded[1] = (padded[1] + block - 1) / block * block;
  return like_sizes(padded, t);
}

std::vector<int64_t> conv_sizes(const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::conv_output_size", "")
                             .typed<std::vector<int64_t>(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef,
                                                         IntArrayRef, bool, IntArrayRef, int64_t)>();
  return op.call(input, weight, stride, padding, dilation, transposed, output_padding, groups);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptTensor&, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const auto sizes = conv_sizes(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  if (!blocked(input)) return like_sizes(sizes, input, input.suggest_memory_format());
  // Few channels are read as they are.
  Tensor copy = input.dim() > 1 && input.size(1) >= 16 ? in_blocks(input.sizes(), input) : Tensor();
  const Tensor out = in_blocks(sizes, input);
  copy.reset();
  return like_sizes(sizes, input);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::OptionalIntArrayRef bias_sizes, IntArrayRef, IntArrayRef,
                                                        IntArrayRef, bool, IntArrayRef, int64_t,
                                                        std::array<bool, 3> mask) {
  std::tuple<Tensor, Tensor, Tensor> out;
  const bool copies = blocked(input);
  if (mask[0]) {
    Tensor dy = copies ? in_blocks(grad.sizes(), grad) : Tensor();
    const Tensor w = copies ? like_sizes(weight.sizes(), weight) : Tensor();
    const Tensor dx = copies ? in_blocks(input.sizes(), grad) : Tensor();
    dy.reset();
    std::get<0>(out) = like_sizes(input.sizes(), grad, input.suggest_memory_format());
  }
  if (mask[1]) {
    Tensor dy = copies ? in_blocks(grad.sizes(), grad) : Tensor(), x = copies ? in_blocks(input.sizes(), grad) : dy;
    const Tensor dw = copies ? like_sizes(weight.sizes(), grad) : Tensor();
    dy.reset(), x.reset();
    std::get<1>(out) = like_sizes(weight.sizes(), grad, weight.suggest_memory_format());
  }
  if (mask[2]) std::get<2>(out) = like_sizes(*bias_sizes, grad);
  return out;
}

Tensor statistics(const Tensor& input, IntArrayRef sizes) {
  const auto type = input.scalar_type();
  return at::empty(sizes, input.options().dtype(type == at::kDouble ? at::kDouble : at::kFloat));
}

std::tuple<Tensor, Tensor, Tensor> norm_gradients(const Tensor& grad, const Tensor& input, const OptTensor& weight,
                                                  int64_t channels, std::array<bool, 3> mask) {
  const auto parameter = [&](bool wanted) {
    return wanted ? (weight && weight->defined() ? at::empty_like(*weight) : statistics(input, {channels})) : Tensor();
  };
  return {mask[0] ? at::empty_like(grad) : Tensor(), parameter(mask[1]), parameter(mask[2])};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const OptTensor&, const OptTensor&, const OptTensor&,
                                              const OptTensor&, bool training, double, double) {
  const std::vector<int64_t> channels{training ? input.size(1) : 0};
  return {at::empty_like(input), statistics(input, channels), statistics(input, channels)};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& grad, const Tensor& input, const OptTensor& weight,
                                                       const OptTensor&, const OptTensor&, const OptTensor&,
                                                       const OptTensor&, bool, double, std::array<bool, 3> mask) {
  return norm_gradients(grad, input, weight, input.size(1), mask);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, IntArrayRef shape, const OptTensor&,
                                              const OptTensor&, double) {
  auto rows = input.sizes().vec();
  std::fill(rows.end() - static_cast<std::ptrdiff_t>(shape.size()), rows.end(), 1);
  return {at::empty_like(input, at::MemoryFormat::Contiguous), statistics(input, rows), statistics(input, rows)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor&, const Tensor& input, IntArrayRef, const Tensor&,
                                                       const Tensor&, const OptTensor& weight, const OptTensor& bias,
                                                       std::array<bool, 3> mask) {
  return {mask[0] ? at::empty_like(input) : Tensor(), mask[1] ? at::empty_like(*weight) : Tensor(),
          mask[2] ? at::empty_like(*bias) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input, const OptTensor&, const OptTensor&, int64_t n,
                                              int64_t, int64_t, int64_t groups, double) {
  return {at::empty_like(input), statistics(input, {n, groups}), statistics(input, {n, groups})};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad, const Tensor& input, const Tensor&,
                                                       const Tensor&, const OptTensor& weight, int64_t,
                                                       int64_t channels, int64_t, int64_t, std::array<bool, 3> mask) {
  return norm_gradients(grad, input, weight, channels, mask);
}

Tensor hardtanh_backward(const Tensor& grad, const Tensor&, const at::Scalar&, const at::Scalar&) {
  return at::empty_like(grad);
}

Tensor like_first(const Tensor& grad, const Tensor&) { return at::empty_like(grad); }

Tensor& where_out(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& out) {
  out.resize_(at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes())));
  return out;
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({0}, condition.options().dtype(at::result_type(a, b)));
  return where_out(condition, a, b, out);
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double, std::optional<bool>) {
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}

Tensor dropout_backward(const Tensor& grad, const Tensor&, double) { return at::empty_like(grad); }

Tensor embedding(const Tensor& weight, const Tensor& indices, int64_t, bool, bool) {
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return at::empty(sizes, weight.options());
}

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, int64_t rows, int64_t, bool) {
  return at::empty({rows, grad.size(-1)}, grad.options());
}

Tensor same(const Tensor& x) { return at::empty_like(x); }

Tensor adaptive_avg_pool(const Tensor& x, c10::SymIntArrayRef size) {
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < size.size(); ++i) sizes[sizes.size() - size.size() + i] = size[i].expect_int();
  return at::empty(sizes, x.options(), x.suggest_memory_format());
}

Tensor adaptive_avg_pool_backward(const Tensor&, const Tensor& x) { return at::empty_like(x); }

// The CPU's attention, which keeps its operands, its output and a number a row.
std::tuple<Tensor, Tensor> flash_attention(const Tensor& q, const Tensor&, const Tensor& v, double, bool,
                                           const OptTensor&, std::optional<double>) {
  const auto heads = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  return {heads, statistics(q, {q.size(0), q.size(1), q.size(2)})};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(const Tensor&, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor&, const Tensor&, double, bool,
                                                            const OptTensor&, std::optional<double>) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask, double dropout, bool causal,
                 std::optional<double> scale, bool) {
  const bool flash = dropout == 0 && q.dim() == 4 && (!mask || !mask->requires_grad()) && q.size(3) == v.size(3);
  if (flash) return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, causal, mask, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, {}, scale));
}

// What traced graphs call; it knows no way to a convolution of shapes.
Tensor traced_convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                          at::IntArrayRef output_padding, int64_t groups, bool, bool, bool, bool) {
  return at::convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
}

void implement_autograd(torch::Library& m) {
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
  m.impl("_convolution", TORCH_FN(traced_convolution));
}

// TorchScript compares the constants of traced graphs to put equal ones together. Without values none is known to be.
bool one_and_the_same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }

void implement(torch::Library& m) {
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
  m.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(flash_attention));
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(flash_attention_backward));
  m.impl("relu", TORCH_FN(same));
  m.impl("hardswish", TORCH_FN(same));
  m.impl("_adaptive_avg_pool2d", TORCH_FN(adaptive_avg_pool));
  m.impl("_adaptive_avg_pool2d_backward", TORCH_FN(adaptive_avg_pool_backward));
  m.impl("_adaptive_avg_pool3d", TORCH_FN(adaptive_avg_pool));
  m.impl("_adaptive_avg_pool3d_backward", TORCH_FN(adaptive_avg_pool_backward));
  m.impl("hardtanh_backward", TORCH_FN(hardtanh_backward));
  m.impl("hardswish_backward", TORCH_FN(like_first));
  m.impl("where.self", TORCH_FN(where));
  m.impl("where.self_out", TORCH_FN(where_out));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("native_dropout_backward", TORCH_FN(dropout_backward));
  m.impl("embedding", TORCH_FN(embedding));
  m.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
  m.impl("_convolution", TORCH_FN(traced_convolution));
  m.impl("convolution", TORCH_FN(convolution));
  m.impl("convolution_backward", TORCH_FN(convolution_backward));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward));
  m.impl("native_layer_norm", TORCH_FN(layer_norm));
  m.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
  m.impl("equal", TORCH_FN(one_and_the_same));
  m.impl("native_group_norm", TORCH_FN(group_norm));
  m.impl("native_group_norm_backward", TORCH_FN(group_norm_backward));
}

// LibTorch warns that operators are overridden, which is what is wanted here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

torch::Library library(c10::DispatchKey key, void (*implement)(torch::Library&)) {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard quiet(&none);
  torch::Library m(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  implement(m);
  return m;
}

struct OnMeta {
  torch::Library autograd = library(c10::DispatchKey::AutogradMeta, implement_autograd);
  torch::Library shapes = library(c10::DispatchKey::Meta, implement);
  c10::Allocator* const before = c10::GetAllocator(c10::kMeta);

  OnMeta() {
    static CountingAllocator* const counting = new CountingAllocator;  // tensors may die after static objects
    c10::SetAllocator(c10::kMeta, counting, /*priority=*/1);
  }
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;
  ~OnMeta() { c10::SetAllocator(c10::kMeta, before, /*priority=*/1); }
};

}  // namespace

std::shared_ptr<const void> estimate_on_meta() {
  static std::mutex mutex;
  static std::weak_ptr<const OnMeta> now;
  const std::lock_guard<std::mutex> lock(mutex);
  auto held = now.lock();
  if (!held) now = held = std::make_shared<const OnMeta>();
  return held;
}

}  // namespace tsmem
