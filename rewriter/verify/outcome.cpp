#include "rewriter/verify/outcome.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cmath>
#include <limits>

#include "rewriter/clock.h"
#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/rewrite/added_names.h"

namespace tsmem {

using c10::IValue;
using torch::jit::Module;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of the same dtype and sizes, in the memory of one element; undefined where that can't be.
static at::Tensor without_values(const at::Tensor& p) {
  if (!p.defined() || p.layout() != at::kStrided || p.is_meta() || p.is_quantized()) return {};
  at::NoGradGuard no_grad;
  return at::zeros({1}, p.options()).expand(p.sizes()).set_requires_grad(p.requires_grad());
}

Copier::Copier(const Module& m, const std::string& device) : module_(m), device_(device) {
  IValue::HashIdentityIValueMap replaced;
  for (const auto& p : m.named_parameters())
    if (auto hollow = without_values(p.value); hollow.defined()) {
      replaced.emplace(p.value, std::move(hollow));
      left_out_.insert(p.name);
    }
  Module(m._ivalue()->deepcopy(replaced)).save(bytes_);
}

Module Copier::operator()(const Module* values) {
  bytes_.clear();
  bytes_.seekg(0);
  Module copy = torch::jit::load(bytes_, device_);
  const auto tensors = [](const Module& m) {
    std::map<std::string, at::Tensor> found;
    for (const auto& p : m.named_parameters()) found.emplace(p.name, p.value.detach());
    return found;
  };
  const auto own = tensors(module_);
  const auto shared = values ? tensors(*values) : std::map<std::string, at::Tensor>();
  for (const auto& p : copy.named_parameters()) {
    if (!left_out_.count(p.name)) continue;
    const at::Tensor& value = own.at(p.name);
    const auto other = shared.find(p.name);
    p.value.set_data(other != shared.end() && other->second.strides() == value.strides()
                         ? other->second
                         : value.to(device_, /*non_blocking=*/false, /*copy=*/true));
  }
  return copy;
}

void to_double(const Module& m) {
  for (const auto& sub : m.modules())
    for (auto& v : sub._ivalue()->slots())
      if (!v.isObject() && !v.isCapsule())
        for (auto& t : floating_tensors(v))
          if (t.scalar_type() != at::kDouble) t.set_data(t.detach().to(at::kDouble));
}

at::Tensor channels_last(const at::Tensor& t) {
  return t.dim() == 4   ? t.contiguous(at::MemoryFormat::ChannelsLast)
         : t.dim() == 5 ? t.contiguous(at::MemoryFormat::ChannelsLast3d)
                        : t;
}

// Dense and on the CPU; shares the memory of what is so already.
static at::Tensor kept(const at::Tensor& t) {
  if (!t.defined()) return t;
  auto u = t.detach();
  if (!u.device().is_cpu()) u = u.cpu();
  if (u.layout() != at::kStrided) u = u.to_dense();
  if (u.is_complex()) u = at::view_as_real(u.resolve_conj());
  return u.is_quantized() ? u.dequantize() : u;
}

// In blocks that stay in the cache: the norm in float64 of a large tensor would be that of a copy in float64.
constexpr int64_t kBlock = 1 << 16;

double norm_of(const at::Tensor& t) {
  if (t.numel() <= kBlock || !t.is_contiguous())
    return at::linalg_vector_norm(t, 2, {}, false, at::kDouble).item<double>();
  const at::Tensor flat = t.view(-1);
  double squares = 0;
  for (int64_t i = 0; i < flat.numel(); i += kBlock) {
    const double norm = norm_of(flat.slice(0, i, std::min(i + kBlock, flat.numel())));
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

static double norm_of_difference(const at::Tensor& u, const at::Tensor& v) {
  if (u.numel() > kBlock && u.is_contiguous() && v.is_contiguous()) {
    const at::Tensor x = u.view(-1), y = v.view(-1);
    double squares = 0;
    for (int64_t i = 0; i < x.numel(); i += kBlock) {
      const int64_t end = std::min(i + kBlock, x.numel());
      const double norm = norm_of_difference(x.slice(0, i, end), y.slice(0, i, end));
      squares += norm * norm;
    }
    return std::sqrt(squares);
  }
  const bool direct = u.scalar_type() == v.scalar_type() && u.element_size() >= 4;
  return norm_of(direct ? u - v : u.to(at::kDouble) - v.to(at::kDouble));
}

static at::Tensor finite_part(const at::Tensor& t) { return t.masked_fill(t.isfinite().logical_not(), 0); }

double size_of(const Named& v) {
  if (v.size < 0) {
    v.size = norm_of(v.value);
    if (!std::isfinite(v.size)) v.size = norm_of(finite_part(v.value));
  }
  return v.size;
}

// |u - v|; of whole numbers the part of |v| that differs.
static double distance(const at::Tensor& u, const Named& named) {
  auto& v = named.value;
  if (u.sizes() != v.sizes() || u.is_floating_point() != v.is_floating_point()) return kInfinity;
  if (u.numel() == 0) return 0;
  if (!u.is_floating_point())
    return u.scalar_type() != v.scalar_type() ? kInfinity : u.ne(v).to(at::kDouble).mean().item<double>();
  const double d = norm_of_difference(u, v);
  if (std::isfinite(d)) return d;
  // Where A is not finite B must be the same.
  auto odd = v.isfinite().logical_not();
  if (!u.isfinite().logical_not().equal(odd) ||
      !at::allclose(u.masked_select(odd).to(at::kDouble), v.masked_select(odd).to(at::kDouble), 0, 0,
                    /*equal_nan=*/true))
    return kInfinity;
  return norm_of_difference(finite_part(u), finite_part(v));
}

double worst(const std::vector<Named>& us, const std::vector<Named>& vs) {
  if (us.size() != vs.size()) return kInfinity;
  auto real = [](const Named& v) { return v.value.defined() && v.value.is_floating_point() && v.value.numel(); };
  std::vector<double> sizes;
  for (auto& v : vs)
    if (real(v)) sizes.push_back(size_of(v));
  std::sort(sizes.begin(), sizes.end());
  // Beside larger ones the gradient of a bias before a norm is zero but for rounding, and where a norm has two samples
  // most are.
  double floor = 1e-30, most = 0;
  if (!sizes.empty()) floor = std::max({floor, 1e-2 * sizes[sizes.size() / 2], 1e-5 * sizes.back()});
  for (size_t i = 0; i < us.size(); ++i)
    if (us[i].value.defined() && vs[i].value.defined()) {
      double d = distance(us[i].value, vs[i]);
      most = std::max(most, d > 0 && real(vs[i]) ? d / std::max(size_of(vs[i]), floor) : d);
    }
  return most;
}

Errors errors(const Outcome& u, const Outcome& v) {
  return {worst(u.outputs, v.outputs), worst(u.gradients, v.gradients),
          std::max(worst(u.buffers, v.buffers), worst(u.inputs, v.inputs))};
}

std::vector<IValue> vary(const std::vector<IValue>& inputs, int n, double size, uint64_t seed) {
  std::vector<IValue> out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    uint64_t count = 0;
    out.push_back(map_tensors(inputs[i], [&](const at::Tensor& t) {
      if (n == 0 || !t.is_floating_point()) return t.detach().clone();
      auto noise = cotangents({t}, seed + 7919 * static_cast<uint64_t>(n) + 104729 * i + count++)[0];
      return (t + t * noise * size).to(t.scalar_type());
    }));
  }
  return out;
}

std::vector<IValue> in_double(const std::vector<IValue>& inputs) {
  std::vector<IValue> out;
  for (auto& v : inputs) out.push_back(clone_value(v, at::kDouble));
  return out;
}

double epsilon_of(at::ScalarType t) {
  switch (t) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::ldexp(1.0, -10);
    case at::kBFloat16:
      return std::ldexp(1.0, -7);
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

double epsilon_of(const Module& m, const std::vector<IValue>& inputs) {
  double e = std::numeric_limits<double>::epsilon();
  bool any = false;
  auto add = [&](const at::Tensor& t) {
    if (!t.is_floating_point()) return;
    e = std::max(e, epsilon_of(t.scalar_type()));
    any = true;
  };
  for (const auto& p : m.parameters()) add(p);
  for (auto& t : floating_tensors(c10::ivalue::Tuple::create(inputs))) add(t);
  return any ? e : epsilon_of(at::kFloat);
}

static std::string dtype_name(at::ScalarType t) {
  switch (t) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kByte:
      return "uint8";
    default: {
      std::string name = at::toString(t);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      return name;
    }
  }
}

std::vector<std::string> described(const std::vector<IValue>& inputs) {
  std::vector<std::string> out;
  for (const auto& t : all_tensors(c10::ivalue::Tuple::create(inputs)))
    out.push_back(fmt::format("{} {}", t.dim() ? fmt::format("{}", fmt::join(t.sizes(), "x")) : "()",
                              dtype_name(t.scalar_type())));
  return out;
}

// A value that is no tensor as one: a number as itself, anything else as a hash of what it says.
static at::Tensor as_tensor(const IValue& v) {
  if (v.isTensor() && v.toTensor().defined()) return kept(v.toTensor());
  if (v.isInt()) return at::scalar_tensor(v.toInt(), at::kLong);
  if (v.isBool()) return at::scalar_tensor(v.toBool(), at::kBool);
  if (v.isDouble()) return at::scalar_tensor(v.toDouble(), at::kDouble);
  if (v.isComplexDouble()) return at::view_as_real(at::scalar_tensor(v.toComplexDouble(), at::kComplexDouble));
  const std::string text = v.isString() ? v.toStringRef() : v.isTensor() ? "None" : v.tagKind();
  return at::scalar_tensor(static_cast<int64_t>(std::hash<std::string>()(text)), at::kLong);
}

// The attributes that are neither parameters nor buffers, and what is in them: numbers, lists, dicts.
static std::vector<Named> other_attributes(const Module& m) {
  std::vector<Named> found;
  for (const auto& [path, sub] : m.named_modules()) {
    const auto type = sub.type();
    for (size_t i = 0; i < type->numAttributes(); ++i) {
      const auto& declared = type->getAttribute(i);
      const std::string& name = type->getAttributeName(i);
      if (declared->is_module() || declared->isSubtypeOf(*c10::TensorType::get()) || is_added_name(name)) continue;
      for (const IValue& v : all_values(sub._ivalue()->getSlot(i)))
        found.push_back({path.empty() ? name : fmt::format("{}.{}", path, name), as_tensor(v).clone()});
    }
  }
  return found;
}

// Of each storage, the input, parameter or buffer that is in it.
static std::map<const void*, std::string> owners(const Module& m, const std::vector<IValue>& inputs) {
  std::map<const void*, std::string> found;
  const auto add = [&](const at::Tensor& t, const std::string& name) {
    if (t.defined() && t.has_storage()) found.emplace(t.storage().unsafeGetStorageImpl(), name);
  };
  int n = 0;
  for (const auto& t : all_tensors(c10::ivalue::Tuple::create(inputs))) add(t, fmt::format("input {}", n++));
  for (const auto& p : m.named_parameters()) add(p.value, fmt::format("'{}'", p.name));
  for (const auto& b : m.named_buffers()) add(b.value, fmt::format("'{}'", b.name));
  return found;
}

// Without its sizes, which may depend on values. Of a dimension of size 1 the stride says nothing.
static std::string layout_of(const at::Tensor& t) {
  if (t.is_contiguous()) return "is contiguous";
  std::vector<int64_t> order;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  return fmt::format("has its dimensions in memory in the order ({}){}", fmt::join(order, ", "),
                     t.is_non_overlapping_and_dense() ? "" : ", not densely");
}

static std::vector<Trait> output_traits(const std::vector<at::Tensor>& outputs,
                                        std::map<const void*, std::string> owners) {
  std::vector<Trait> out;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& t = outputs[i];
    const std::string name = fmt::format("output {}", i);
    const auto add = [&](Trait::Kind kind, std::string text) { out.push_back({name, kind, std::move(text)}); };
    add(Trait::Kind::dtype, fmt::format("is {}", at::toString(t.scalar_type())));
    add(Trait::Kind::requires_grad, t.requires_grad() ? "requires a gradient" : kRequiresNone);
    if (t.layout() != at::kStrided || !t.has_storage() || t.numel() == 0) continue;
    add(Trait::Kind::layout, layout_of(t));
    const auto [owner, own] = owners.emplace(t.storage().unsafeGetStorageImpl(), name);
    add(Trait::Kind::memory, own ? "has memory of its own" : fmt::format("is in the memory of {}", owner->second));
  }
  return out;
}

Outcome Run::operator()(Module& m, const std::vector<IValue>& given, uint64_t seed) const {
  const bool optimised =
      torch::jit::getGraphExecutorOptimize() && !(as_written && as_written->count(m._ivalue().get()));
  const torch::jit::GraphOptimizerEnabledGuard guard(optimised);
  Outcome out;
  std::vector<IValue> inputs;
  for (auto& v : given) inputs.push_back(clone_value(v));
  auto leaves = floating_tensors(c10::ivalue::Tuple::create(inputs));
  std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(c10::kCPU)};
  if (device.is_cuda()) generators.push_back(at::globalContext().defaultGenerator(device));
  for (auto& g : generators) {
    std::lock_guard lock(g.mutex());
    g.set_current_seed(seed);
  }
  std::map<std::string, int64_t> versions;
  for (const auto& p : m.named_parameters()) {
    p.value.mutable_grad() = at::Tensor();
    versions[p.name] = p.value._version();
  }
  const auto overwritten = [&] {
    std::vector<torch::jit::NameTensor> found;
    for (const auto& p : m.named_parameters())
      if (unseen_writes || p.value._version() != versions[p.name]) found.push_back(p);
    return found;
  };
  at::AutoGradMode mode(grad);
  const auto start = Clock::now();
  if (grad && input_grad)
    for (auto& t : leaves) t.requires_grad_();
  try {
    auto output = m.get_method(method)(inputs);
    auto floating = floating_tensors(output);
    std::vector<at::Tensor> roots, random;
    if (grad) {
      auto all = cotangents(floating, seed);
      for (size_t i = 0; i < floating.size(); ++i)
        if (floating[i].requires_grad()) {
          roots.push_back(floating[i]);
          random.push_back(all[i]);
        }
    }
    for (const IValue& v : all_values(output)) out.outputs.push_back({"", as_tensor(v)});
    out.traits = output_traits(all_tensors(output), owners(m, inputs));
    if (!roots.empty() && backward) torch::autograd::backward(roots, random);
    out.seconds = seconds_since(start);
    for (const auto& p : m.named_parameters()) out.gradients.push_back({p.name, kept(p.value.grad())});
    for (const auto& p : m.parameters()) p.mutable_grad() = at::Tensor();
    for (size_t i = 0; i < leaves.size(); ++i)
      if (grad && input_grad) out.gradients.push_back({fmt::format("input {}", i), kept(leaves[i].grad())});
    for (const auto& p : overwritten()) out.buffers.push_back({p.name, kept(p.value).clone()});
    for (const auto& b : m.named_buffers())
      out.buffers.push_back({b.name, b.value.defined() ? kept(b.value).clone() : b.value});
    for (auto& a : other_attributes(m)) out.buffers.push_back(std::move(a));
    for (auto& t : all_tensors(c10::ivalue::Tuple::create(inputs)))
      out.inputs.push_back({fmt::format("input {}", out.inputs.size()), kept(t)});
  } catch (const std::exception& e) {
    out.error = sentence(e);
  }
  if (shares_parameters && !overwritten().empty()) throw OverwritesParameter();
  if (!out.error.empty()) return out;
  for (auto& g : generators) {
    std::lock_guard lock(g.mutex());
    out.random.push_back(g.get_state());
  }
  return out;
}

}  // namespace tsmem
