#include "common.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/passes/autocast.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <mutex>

#include "cuda_library.h"

namespace tsmem {

namespace {
thread_local bool eager_autocast = false;

}  // namespace

bool follows_eager_autocast() { return eager_autocast; }
bool follow_eager_autocast(bool whether) { return std::exchange(eager_autocast, whether); }

bool scripted_autocast(at::DeviceType device) {
  return !eager_autocast && at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
         torch::jit::autocastEnabled() && !torch::jit::currentCallstack().empty();
}

at::Tensor as_scripted(const at::Tensor& t) {
  return t.defined() && low_precision(t) && scripted_autocast(t.device().type()) ? t.to(at::kFloat) : t;
}

bool same_in_place(const at::Tensor& target, const at::Tensor& other) {
  return at::result_type(target, other) == target.scalar_type() &&
         at::infer_size(target.sizes(), other.sizes()) == target.sizes();
}

at::Tensor in_strides(const at::Tensor& made, at::IntArrayRef strides) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet wrappers{DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::FuncTorchBatched,
                                         DispatchKey::FuncTorchGradWrapper};
  auto* impl = made.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || made.layout() != at::kStrided || impl->key_set().has_any(wrappers) ||
      made.numel() == 0 || made.strides() == strides)
    return made;
  for (int64_t d = 0; d < made.dim(); ++d)
    if (made.size(d) != 1 && made.stride(d) != strides[d])
      return at::empty_strided(made.sizes(), strides, made.options()).copy_(made);
  const std::vector<int64_t> sizes = made.sizes().vec();
  impl->set_sizes_and_strides(sizes, strides);
  return made;
}

at::Tensor in_target_strides(const at::Tensor& made, const at::Tensor& first, const at::Tensor& second,
                             int64_t in_place) {
  const at::Tensor& target = in_place == kFirst ? first : second;
  if (makes_new(in_place) || target.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
      target.layout() != at::kStrided)
    return made;
  return in_strides(made, target.strides());
}

bool plain(const at::Tensor& x) {
  if (!x.is_floating_point() || x.layout() != at::kStrided || x.is_nested() || x._fw_grad(0).defined()) return false;
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (!functorch) return true;
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

namespace {
// The strides of dimensions of size 1 included, which views may have otherwise: what takes t's memory takes its
// strides.
bool as_a_new_tensor(const at::Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  return strides.equals(c10::contiguous_strides(sizes)) ||
         (t.dim() == 4 && strides.equals(c10::get_channels_last_strides_2d(sizes))) ||
         (t.dim() == 5 && strides.equals(c10::get_channels_last_strides_3d(sizes)));
}

// A view holds what it is a view of, without autograd too.
bool holds_its_memory_alone(const at::Tensor& t) {
  const auto holders = t.storage().use_count();
  if (holders == 1) return true;
  return holders == 2 && t.is_view() && t._base().use_count() == 1 && t._base().is_alias_of(t) && as_a_new_tensor(t);
}
}  // namespace

bool only_ours(const at::Tensor& t) {
  return t.defined() && !at::GradMode::is_enabled() && !t.requires_grad() && t.use_count() == 1 && t.has_storage() &&
         holds_its_memory_alone(t) && t.is_non_overlapping_and_dense() && t.numel() > 0 && !t.is_neg() &&
         !t._is_zerotensor() && !t.key_set().has(c10::DispatchKey::Python);
}

bool has_kernel(const c10::OperatorHandle& op, const at::Tensor& x) {
  const auto t = x.scalar_type();
  if (x.is_cuda()) load_cuda_library();
  return (t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf) &&
         op.hasKernelForDispatchKey(c10::computeDispatchKey(t, at::kStrided, x.device()));
}

int64_t graph_offset(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_graph_offset", "");
  if (!x.is_cuda() || x.key_set().has(c10::DispatchKey::Python)) return -1;  // a fake tensor draws nothing
  load_cuda_library();
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return -1;
  return op.typed<int64_t(const at::Tensor&)>().call(x);
}

namespace {
// Address space that reads as zeros and has no memory: private pages that nobody can write. Grows, and is never given
// back, as tensors point into it; doubling keeps the sum within twice the largest.
void* zero_pages(size_t bytes) {
  static std::mutex mutex;
  static void* pages = nullptr;
  static size_t size = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (bytes > size || !pages) {
    size_t wanted = std::max(bytes, std::max(2 * size, size_t{1} << 20));
    void* mapped = mmap(nullptr, wanted, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "tsmem: no address space left for a shape of ", bytes, " bytes");
    pages = mapped;
    size = wanted;
  }
  return pages;
}
}  // namespace

at::Tensor shape_of(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  // A dispatch mode (FakeTensor) wants to see its tensors made.
  if (!options.device().is_cpu() || c10::impl::TorchDispatchModeTLS::any_modes_set())
    return at::empty_strided(sizes, strides, options);
  return at::from_blob(zero_pages(at::detail::computeStorageNbytes(sizes, strides, options.dtype().itemsize())), sizes,
                       strides, options);
}

at::Tensor shape_in(at::IntArrayRef sizes, at::MemoryFormat format, const at::TensorOptions& options) {
  switch (format) {
    case at::MemoryFormat::ChannelsLast:
      return shape_of(sizes, c10::get_channels_last_strides_2d(sizes), options);
    case at::MemoryFormat::ChannelsLast3d:
      return shape_of(sizes, c10::get_channels_last_strides_3d(sizes), options);
    default:
      return shape_of(sizes, c10::contiguous_strides(sizes), options);
  }
}

namespace {
struct Refuse : torch::autograd::Function<Refuse> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList grads,
                                                at::TensorList /*inputs*/, std::string op) {
    ctx->saved_data["op"] = op;
    torch::autograd::variable_list out;
    for (const at::Tensor& g : grads) out.push_back(g.defined() ? g.view_as(g) : g);
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tsmem::", ctx->saved_data["op"].toStringRef(),
                                ": second derivatives are not supported; skip its pattern, or restore the original");
  }
};
}  // namespace

std::vector<at::Tensor> refuse_double_backward(std::vector<at::Tensor> grads, const char* op, at::TensorList inputs) {
  if (!at::GradMode::is_enabled()) return grads;
  // A stand-in for undefined gradients: Function::apply takes defined tensors only.
  std::vector<at::Tensor> defined;
  for (const at::Tensor& g : grads)
    if (g.defined()) defined.push_back(g);
  std::vector<at::Tensor> sources;
  for (const at::Tensor& t : inputs)
    if (t.defined()) sources.push_back(t);
  auto wrapped = Refuse::apply(at::TensorList(defined), at::TensorList(sources), std::string(op));
  size_t i = 0;
  for (at::Tensor& g : grads)
    if (g.defined()) g = wrapped[i++];
  return grads;
}

std::vector<at::Tensor> differentiable_gradients(
    const std::vector<at::Tensor>& operands, at::ArrayRef<bool> want, const std::vector<at::Tensor>& grads,
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& f) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // Views cut the operands off from one another, where one is made from another, and from their hooks.
  std::vector<at::Tensor> cut, wanted;
  for (size_t i = 0; i < operands.size(); ++i) {
    const at::Tensor& t = operands[i];
    if (!t.defined())
      cut.emplace_back();
    else
      cut.push_back(want[i] && !t.requires_grad() ? t.detach().requires_grad_() : t.view_as(t));
    if (want[i]) wanted.push_back(cut[i]);
  }
  const auto results = f(cut);
  std::vector<at::Tensor> outputs, given;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    outputs.push_back(results[i]);
    given.push_back(grads[i]);
  }
  const auto found = torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/true, /*create_graph=*/true);
  std::vector<at::Tensor> all(operands.size());
  for (size_t i = 0, next = 0; i < operands.size(); ++i)
    if (want[i]) all[i] = found[next++];
  return all;
}

std::vector<at::Tensor> differentiable_gradients(const std::vector<at::Tensor>& operands, at::ArrayRef<bool> want,
                                                 const at::Tensor& grad,
                                                 const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f) {
  return differentiable_gradients(operands, want, std::vector<at::Tensor>{grad},
                                  [&](const std::vector<at::Tensor>& t) { return std::vector<at::Tensor>{f(t)}; });
}

}  // namespace tsmem
