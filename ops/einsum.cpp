// einsum and tensordot by products of pairs of operands, as PyTorch composes them (ATen/native/Linear.cpp: einsum,
// sumproduct_pair, tensordot), here by ops that keep what these are made from. Of einsum each operand is brought to the
// same axes, those of the output first, and two at a time become one, by a batch of matrix products where they share an
// axis that is summed, else by a product of elements. The result is PyTorch's, bit for bit; so are gradients, but for
// those of an operand that a product of elements has spread, which are rounded once where PyTorch's are rounded before
// they are summed.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <numeric>

#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Axes = std::vector<int64_t>;

// Which axis each dimension of each operand is. The first `outputs` axes are the output's, in order.
struct Equation {
  std::vector<Axes> operands;
  int64_t outputs = 0;
  int64_t axes = 0;
};

// A subscript: a letter, or from kEllipsis on a dimension that "..." stands for, the last of which is the same one in
// all operands.
using Subscripts = std::vector<int>;
constexpr int kEllipsis = 256, kMostDimensions = 64;

// The subscripts of one term, whose "..." stands for so many dimensions. None: it is no term.
std::optional<Subscripts> subscripts_of(std::string_view term, int64_t dims_of_ellipsis) {
  Subscripts all;
  for (size_t i = 0; i < term.size(); ++i) {
    if (term[i] == '.') {
      if (term.substr(i, 3) != "..." || dims_of_ellipsis < 0) return std::nullopt;
      for (int64_t d = kMostDimensions - dims_of_ellipsis; d < kMostDimensions; ++d)
        all.push_back(kEllipsis + static_cast<int>(d));
      dims_of_ellipsis = -1;  // there is only one
      i += 2;
    } else if ((term[i] >= 'a' && term[i] <= 'z') || (term[i] >= 'A' && term[i] <= 'Z')) {
      all.push_back(term[i]);
    } else {
      return std::nullopt;
    }
  }
  return all;
}

// The subscripts of each operand. None: they are not those of the operands, or one has a diagonal ("ii").
std::optional<std::vector<Subscripts>> subscripts_of_operands(std::string_view terms, at::TensorList operands) {
  std::vector<Subscripts> all;
  for (size_t i = 0; i < operands.size(); ++i) {
    const size_t comma = std::min(terms.find(','), terms.size());
    if ((i + 1 == operands.size()) != (comma == terms.size())) return std::nullopt;
    const std::string_view term = terms.substr(0, comma);
    const bool ellipsis = term.find('.') != std::string_view::npos;
    const int64_t dims = operands[i].dim(), rest = ellipsis ? dims - static_cast<int64_t>(term.size()) + 3 : 0;
    auto subscripts = subscripts_of(term, ellipsis ? rest : -1);
    if (!subscripts || static_cast<int64_t>(subscripts->size()) != dims) return std::nullopt;
    if (std::set<int>(subscripts->begin(), subscripts->end()).size() != subscripts->size()) return std::nullopt;
    all.push_back(std::move(*subscripts));
    terms.remove_prefix(std::min(comma + 1, terms.size()));
  }
  return all;
}

// Whether a space stands inside "->" or "...", where PyTorch takes none.
bool is_torn(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t length = text[i] == '.' ? 3 : text[i] == '-' ? 2 : 1;
    if (length > 1 && text.substr(i, length).find(' ') != std::string_view::npos) return true;
    i += length - 1;
  }
  return false;
}

// None where PyTorch's einsum is to say what is wrong, or does more than products of pairs.
std::optional<Equation> parse(std::string text, at::TensorList operands) {
  if (is_torn(text)) return std::nullopt;
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  const size_t arrow = text.find("->");
  const auto inputs = subscripts_of_operands(std::string_view(text).substr(0, arrow), operands);
  if (!inputs) return std::nullopt;
  std::map<int, int> counts;  // in the order in which axes that are not written come
  int64_t dims_of_ellipsis = 0;
  for (const Subscripts& of_one : *inputs) {
    for (int s : of_one) ++counts[s];
    dims_of_ellipsis = std::max<int64_t>(
        dims_of_ellipsis, std::count_if(of_one.begin(), of_one.end(), [](int s) { return s >= kEllipsis; }));
  }
  std::map<int, int64_t> axis;
  const auto add = [&](int s) { return axis.emplace(s, static_cast<int64_t>(axis.size())).second; };
  const auto add_ellipsis = [&] {
    for (const auto& [s, count] : counts)
      if (s >= kEllipsis) add(s);
  };
  if (arrow == std::string::npos) {
    add_ellipsis();
    for (const auto& [s, count] : counts)
      if (s < kEllipsis && count == 1) add(s);
  } else {
    const auto output = subscripts_of(std::string_view(text).substr(arrow + 2), dims_of_ellipsis);
    if (!output) return std::nullopt;
    for (int s : *output)
      if (!counts.contains(s) || !add(s)) return std::nullopt;
  }
  Equation e{{}, static_cast<int64_t>(axis.size()), 0};
  add_ellipsis();
  for (const auto& [s, count] : counts) add(s);
  e.axes = static_cast<int64_t>(axis.size());
  for (const Subscripts& of_one : *inputs) {
    e.operands.emplace_back();
    for (int s : of_one) e.operands.back().push_back(axis.at(s));
  }
  return e;
}

// t with all axes, in their order; those that it lacks have size 1.
Tensor with_axes(const Tensor& t, const Axes& axes, int64_t all) {
  Tensor wide = t;
  std::vector<int64_t> from(all, -1);
  for (size_t d = 0; d < axes.size(); ++d) from[axes[d]] = static_cast<int64_t>(d);
  for (int64_t& dim : from)
    if (dim < 0) {
      dim = wide.dim();
      wide = wide.unsqueeze(dim);
    }
  return wide.permute(from);
}

// By the dispatcher, where autocast is.
Tensor reshape_by_recipe(const Tensor& t, IntArrayRef sizes, int64_t recompute) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::reshape", "")
                             .typed<Tensor(const Tensor&, IntArrayRef, int64_t)>();
  return op.call(t, sizes, recompute);
}
Tensor bmm(const Tensor& a, const Tensor& b, int64_t recompute) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::bmm", "")
                             .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
  return op.call(a, b, recompute);
}
Tensor mm(const Tensor& a, const Tensor& b, int64_t recompute) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::mm", "")
                             .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
  return op.call(a, b, recompute);
}
Tensor mul_by_recipe(const Tensor& a, const Tensor& b, int64_t recompute) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tsmem::mul", "")
                             .typed<Tensor(const Tensor&, const Tensor&, int64_t, int64_t)>();
  return op.call(a, b, recompute, 0);
}

// That of what is cheap beside the products.
int64_t recompute_of_cheap(RecomputeArgument recompute) {
  return argument_of(recompute.how == Recompute::each_time ? Recompute::each_time
                     : recompute.recomputes()              ? Recompute::shared
                                                           : Recompute::off);
}

int64_t product_of(const Tensor& t, const Axes& axes) {
  return std::accumulate(axes.begin(), axes.end(), int64_t{1}, [&](int64_t all, int64_t d) { return all * t.size(d); });
}

Axes joined(std::initializer_list<const Axes*> parts) {
  Axes all;
  for (const Axes* part : parts) all.insert(all.end(), part->begin(), part->end());
  return all;
}

// The sum over `summed`, which both have, of a b. Of these axes size 1 is left.
Tensor pair(Tensor a, Tensor b, const Axes& summed, int64_t recompute) {
  const int64_t cheap = recompute_of_cheap(recompute);
  if (summed.empty()) return mul_by_recipe(a, b, cheap);
  Axes both, of_a, of_b;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (std::find(summed.begin(), summed.end(), d) != summed.end()) continue;
    const bool in_a = a.size(d) != 1, in_b = b.size(d) != 1;
    (in_a && in_b ? both : in_a ? of_a : of_b).push_back(d);
  }
  // The product then lies in memory as the output does.
  if (!of_a.empty() && !of_b.empty() && of_b.back() < of_a.front()) {
    std::swap(a, b);
    std::swap(of_a, of_b);
  }
  const Axes order = joined({&both, &of_a, &summed, &of_b});
  const int64_t batches = product_of(a, both), inner = product_of(a, summed);
  const Tensor left = reshape_by_recipe(a.permute(order), {batches, product_of(a, of_a), inner}, cheap),
               right = reshape_by_recipe(b.permute(joined({&both, &summed, &of_b, &of_a})),
                                         {batches, inner, product_of(b, of_b)}, cheap);
  std::vector<int64_t> sizes;
  for (int64_t d : both) sizes.push_back(a.size(d));
  for (int64_t d : of_a) sizes.push_back(a.size(d));
  for (size_t i = 0; i < summed.size(); ++i) sizes.push_back(1);
  for (int64_t d : of_b) sizes.push_back(b.size(d));
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
  return bmm(left, right, recompute).view(sizes).permute(back);
}

// Whether an axis has one size, or 1, in all operands.
bool fit(const std::vector<Tensor>& operands) {
  for (int64_t d = 0; d < operands[0].dim(); ++d) {
    int64_t size = 1;
    for (const Tensor& t : operands) {
      if (size != 1 && t.size(d) != 1 && t.size(d) != size) return false;
      if (t.size(d) != 1) size = t.size(d);
    }
  }
  return true;
}

Tensor contract(const Equation& e, std::vector<Tensor> left, const std::optional<std::vector<int64_t>>& path,
                int64_t recompute) {
  std::vector<int64_t> users(e.axes);  // of each axis: the operands that have it with another size than 1
  for (const Tensor& t : left)
    for (int64_t d = 0; d < e.axes; ++d) users[d] += t.size(d) != 1;
  for (size_t step = 0; left.size() > 1; ++step) {
    const size_t i = path ? std::min((*path)[2 * step], (*path)[2 * step + 1]) : 0;
    const size_t j = path ? std::max((*path)[2 * step], (*path)[2 * step + 1]) : 1;
    Tensor a = left[i], b = left[j];
    left.erase(left.begin() + static_cast<int64_t>(j));
    left.erase(left.begin() + static_cast<int64_t>(i));
    Axes summed, of_a, of_b;
    for (int64_t d = e.outputs; d < e.axes; ++d) {
      const bool in_a = a.size(d) != 1, in_b = b.size(d) != 1;
      if (in_a && in_b ? --users[d] != 1 : users[d] != 1 || !(in_a || in_b)) continue;
      (in_a && in_b ? summed : in_a ? of_a : of_b).push_back(d);
      users[d] = 0;
    }
    if (!of_a.empty()) a = a.sum(of_a, true);
    if (!of_b.empty()) b = b.sum(of_b, true);
    const Tensor one = pair(a, b, summed, recompute);
    left.insert(path ? left.end() : left.begin(), one);
  }
  return e.axes == e.outputs ? left[0] : left[0].view(left[0].sizes().slice(0, e.outputs));
}

// Whether each step of the path names two of the operands that are left.
bool is_path(const std::vector<int64_t>& path, size_t operands) {
  if (path.size() != 2 * (operands - 1)) return false;
  for (size_t step = 0; step + 1 < operands; ++step) {
    const int64_t i = path[2 * step], j = path[2 * step + 1], left = static_cast<int64_t>(operands - step);
    if (i == j || i < 0 || j < 0 || i >= left || j >= left) return false;
  }
  return true;
}

Tensor einsum(c10::string_view equation, at::TensorList tensors, at::OptionalIntArrayRef path, int64_t recompute) {
  const auto aten = [&] { return at::einsum(equation, tensors, path); };
  const std::optional<std::vector<int64_t>> steps =
      path ? std::optional<std::vector<int64_t>>(path->vec()) : std::nullopt;
  if (tensors.size() < 2 || (steps && !is_path(*steps, tensors.size()))) return aten();
  bool any = false;
  for (const Tensor& t : tensors) {
    if (!t.defined() || !plain(t) || t.numel() == 0 || t.dim() > kMostDimensions) return aten();
    any |= needs_grad(t);
  }
  const auto parsed = any ? parse(std::string(equation), tensors) : std::nullopt;
  if (!parsed) return aten();
  std::vector<Tensor> operands;
  for (size_t i = 0; i < tensors.size(); ++i)
    operands.push_back(with_axes(tensors[i], parsed->operands[i], parsed->axes));
  return fit(operands) ? contract(*parsed, std::move(operands), steps, recompute) : aten();
}

// Autocast on CUDA casts the operands of einsum itself; that on the CPU those of the products in it.
Tensor einsum_autocast(c10::string_view equation, at::TensorList tensors, at::OptionalIntArrayRef path,
                       int64_t recompute) {
  constexpr auto cuda = c10::DeviceType::CUDA;
  const c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(cuda));
  const auto to = at::autocast::get_lower_precision_fp_from_device_type(cuda);
  std::vector<Tensor> cast;
  for (const Tensor& t : tensors) cast.push_back(cast_for_autocast(to, t, cuda, recompute));
  return einsum(equation, cast, path, recompute);
}

// The dimensions of t that `dims` does not name, where it names each once and t has them all.
std::optional<Axes> others(const Tensor& t, Axes& dims) {
  std::vector<bool> named(t.dim(), false);
  for (int64_t& d : dims) {
    if (d < -t.dim() || d >= t.dim()) return std::nullopt;
    d = c10::maybe_wrap_dim(d, t.dim());
    if (named[d]) return std::nullopt;
    named[d] = true;
  }
  Axes rest;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (!named[d]) rest.push_back(d);
  return rest;
}

// One product of matrices.
Tensor tensordot(const Tensor& self, const Tensor& other, IntArrayRef dims_self, IntArrayRef dims_other,
                 int64_t recompute) {
  const auto aten = [&] { return at::tensordot(self, other, dims_self, dims_other); };
  // Autocast on CUDA casts the operands of tensordot itself, to the wider dtype.
  const bool cast = self.is_cuda() && at::autocast::is_autocast_enabled(c10::DeviceType::CUDA);
  if (cast || !needs_grad(self, other) || !plain(self) || !plain(other) || self.scalar_type() != other.scalar_type() ||
      dims_self.size() != dims_other.size() || self.numel() == 0 || other.numel() == 0)
    return aten();
  Axes of_a = dims_self.vec(), of_b = dims_other.vec();
  const auto rest_of_a = others(self, of_a), rest_of_b = others(other, of_b);
  if (!rest_of_a || !rest_of_b || rest_of_a->size() + rest_of_b->size() == 0) return aten();
  Tensor a = self, b = other;
  int64_t inner = 1;
  for (size_t i = 0; i < of_a.size(); ++i) {
    const int64_t in_a = self.size(of_a[i]), in_b = other.size(of_b[i]);
    if (in_b == 1)
      a = a.sum(of_a[i], true, a.scalar_type());
    else if (in_a == 1)
      b = b.sum(of_b[i], true, b.scalar_type());
    else if (in_a != in_b)
      return aten();
    else
      inner *= in_a;
  }
  const int64_t cheap = recompute_of_cheap(recompute);
  const Tensor left = reshape_by_recipe(a.permute(joined({&*rest_of_a, &of_a})), {product_of(a, *rest_of_a), inner},
                                        cheap),
               right = reshape_by_recipe(b.permute(joined({&of_b, &*rest_of_b})), {inner, product_of(b, *rest_of_b)},
                                         cheap);
  std::vector<int64_t> sizes;
  for (int64_t d : *rest_of_a) sizes.push_back(a.size(d));
  for (int64_t d : *rest_of_b) sizes.push_back(b.size(d));
  return mm(left, right, recompute).view(sizes);
}

}  // namespace

void register_einsum(torch::Library& m) {
  m.def("tensordot(Tensor self, Tensor other, int[] dims_self, int[] dims_other, int recompute=0) -> Tensor",
        TORCH_FN(tensordot));
  m.def("einsum(str equation, Tensor[] tensors, int[]? path=None, int recompute=0) -> Tensor", TORCH_FN(einsum));
  m.impl("einsum", c10::DispatchKey::AutocastCUDA, TORCH_FN(einsum_autocast));
}

}  // namespace tsmem
