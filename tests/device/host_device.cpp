// A device that is none of PyTorch's own: PyTorch's place for those of others (PrivateUse1), whose memory is the host's
// and whose operators are the CPU's, on copies. For tests/ops/test_other_devices.py, which counts what is alive there.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> live{0}, peak{0};
std::mutex mutex;
std::unordered_map<void*, int64_t> sizes;

void release(void* p) {
  if (!p) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    live -= sizes.at(p);
    sizes.erase(p);
  }
  c10::free_cpu(p);
}

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = c10::alloc_cpu(bytes);
    if (p) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes.emplace(p, bytes);
      live += static_cast<int64_t>(bytes);
      peak = std::max(peak.load(), live.load());
    }
    return {p, p, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory)

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& t) {
  return t.defined() && t.device().type() == kDevice ? at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(),
                                                                     t.strides(), t.options().device(at::kCPU))
                                                     : t;
}

std::optional<at::Tensor> on_cpu(const std::optional<at::Tensor>& t) { return t ? std::optional(on_cpu(*t)) : t; }

at::Tensor on_device(const at::Tensor& t) {
  return t.defined() ? empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {}).copy_(t) : t;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_into(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& t) { return on_cpu(t).item(); }

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  return on_device(at::convolution(on_cpu(input), on_cpu(weight), on_cpu(bias), stride, padding, dilation, transposed,
                                   output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
                                                                    const at::Tensor& weight, c10::IntArrayRef stride,
                                                                    c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                                    bool transposed, c10::IntArrayRef output_padding,
                                                                    int64_t groups, std::array<bool, 3> want) {
  const std::array<int64_t, 1> channels = {transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [x, w, b] = at::convolution_backward(on_cpu(grad), on_cpu(input), on_cpu(weight), channels, stride,
                                                  padding, dilation, transposed, output_padding, groups, want);
  return {on_device(x), on_device(w), on_device(b)};
}

// Its schema does not say that it overwrites the running statistics, which a copy would lose.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const std::optional<at::Tensor>& mean,
                                                          const std::optional<at::Tensor>& var, bool training,
                                                          double momentum, double eps) {
  const auto [out, now, inverse] = at::native_batch_norm(on_cpu(input), on_cpu(weight), on_cpu(bias), on_cpu(mean),
                                                         on_cpu(var), training, momentum, eps);
  return {on_device(out), on_device(now), on_device(inverse)};
}

int64_t attention_by_products(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                              double, bool, std::optional<double>, bool) {
  return 0;
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_into);
  m.impl("_local_scalar_dense", &number);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_by_products);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

#define TSMEM_EXPORT extern "C" __attribute__((visibility("default")))

TSMEM_EXPORT int64_t device_live() { return live; }
// Since the last call.
TSMEM_EXPORT int64_t device_peak() { return peak.exchange(live); }
