// What must not change between a model and its rewritten form, numbers aside.
#include <fmt/ranges.h>

#include <regex>
#include <unordered_map>

#include "rewriter/rewrite/added_names.h"
#include "rewriter/verify/verify.h"

namespace tsmem {
namespace {

using c10::IValue;
using torch::jit::Module;

// Type names without the numbers that loading puts into them.
std::string plain(const std::string& type) {
  static const std::regex mangle(R"(___torch_mangle_\d+\.)");
  return std::regex_replace(type, mangle, "");
}

std::string shape(const at::Tensor& t) {
  return fmt::format("{} {}", c10::toString(t.scalar_type()), fmt::join(t.sizes(), "x"));
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_meta() || b.is_meta()) return a.is_meta() == b.is_meta();
  auto x = a.detach().cpu(), y = b.detach().cpu();
  if (x.layout() != y.layout()) return false;
  if (x.layout() != at::kStrided) return x.to_dense().equal(y.to_dense());
  if (x.is_quantized() != y.is_quantized()) return false;
  if (x.is_complex() && y.is_complex()) {  // whose NaNs allclose doesn't take for equal
    x = at::view_as_real(x.resolve_conj());
    y = at::view_as_real(y.resolve_conj());
  }
  return x.equal(y) || (x.is_floating_point() && at::allclose(x, y, 0, 0, /*equal_nan=*/true));
}

// Names and tensors in order; the third says whether it is a parameter.
struct Entry {
  std::string name;
  at::Tensor tensor;
};

std::vector<Entry> entries(const Module& m, bool parameters) {
  std::vector<Entry> out;
  if (parameters)
    for (const auto& p : m.named_parameters()) out.push_back({p.name, p.value});
  else
    for (const auto& p : m.named_buffers()) out.push_back({p.name, p.value});
  return out;
}

void compare_tensors(const char* kind, const std::vector<Entry>& a, const std::vector<Entry>& b, bool grad,
                     std::vector<std::string>& out) {
  auto names = [](const std::vector<Entry>& v) {
    std::vector<std::string> n;
    for (auto& e : v) n.push_back(e.name);
    return n;
  };
  auto na = names(a), nb = names(b);
  if (na != nb) {
    auto sa = std::set(na.begin(), na.end()), sb = std::set(nb.begin(), nb.end());
    for (auto& n : na)
      if (!sb.contains(n)) out.push_back(fmt::format("{} '{}' is only in the first model.", kind, n));
    for (auto& n : nb)
      if (!sa.contains(n)) out.push_back(fmt::format("{} '{}' is only in the second model.", kind, n));
    if (sa == sb) out.push_back(fmt::format("{}s come in another order.", kind));
    return;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    auto &x = a[i].tensor, &y = b[i].tensor;
    if (x.defined() != y.defined())
      out.push_back(fmt::format("{} '{}' is undefined in one model.", kind, a[i].name));
    else if (!x.defined())
      continue;
    else if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type())
      out.push_back(
          fmt::format("{} '{}' is {} in the first model and {} in the second.", kind, a[i].name, shape(x), shape(y)));
    else if (!grad && !same_values(x, y))
      out.push_back(fmt::format("{} '{}' has other values.", kind, a[i].name));
    else if (grad && x.requires_grad() != y.requires_grad())
      out.push_back(fmt::format("{} '{}' {} a gradient in the first model alone.", kind, a[i].name,
                                x.requires_grad() ? "needs" : "needs no"));
  }
}

// For each tensor the first one that is the same memory.
std::vector<std::string> sharing(const std::vector<Entry>& v) {
  std::map<std::tuple<const void*, int64_t>, std::string> first;
  std::vector<std::string> out;
  for (auto& e : v) {
    bool storage = e.tensor.defined() && e.tensor.has_storage() && e.tensor.storage().nbytes() > 0;
    out.push_back(
        storage ? first.try_emplace({e.tensor.storage().unsafeGetStorageImpl(), e.tensor.storage_offset()}, e.name)
                      .first->second
                : e.name);
  }
  return out;
}

bool same_attribute(const IValue& a, const IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    auto &x = a.toTensor(), &y = b.toTensor();
    return x.defined() == y.defined() &&
           (!x.defined() || (x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() && same_values(x, y)));
  }
  if (a.isList() && b.isList()) {
    auto x = a.toListRef(), y = b.toListRef();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same_attribute);
  }
  if (a.isTuple() && b.isTuple()) {
    auto &x = a.toTupleRef().elements(), &y = b.toTupleRef().elements();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same_attribute);
  }
  if (a.isGenericDict() && b.isGenericDict()) {
    auto x = a.toGenericDict(), y = b.toGenericDict();
    if (x.size() != y.size()) return false;
    for (auto i = x.begin(), j = y.begin(); i != x.end(); ++i, ++j)
      if (!same_attribute(i->key(), j->key()) || !same_attribute(i->value(), j->value())) return false;
    return true;
  }
  if (a.isDouble() && b.isDouble())
    return a.toDouble() == b.toDouble() || (a.toDouble() != a.toDouble() && b.toDouble() != b.toDouble());
  if (a.isInt() || a.isBool() || a.isString() || a.isNone() || a.isComplexDouble() || a.isDevice())
    return a.tagKind() == b.tagKind() && a == b;
  return a.tagKind() == b.tagKind();  // an object of a custom class has no comparison
}

std::string signature(const torch::jit::Function& f) {
  auto& schema = f.getSchema();
  std::string text;
  // The first argument is the module, whose class may have another name.
  for (size_t i = 1; i < schema.arguments().size(); ++i) {
    auto& a = schema.arguments()[i];
    text += fmt::format("{}{}: {}", i == 1 ? "" : ", ", a.name(), plain(a.type()->annotation_str()));
    if (auto& value = a.default_value()) {
      std::ostringstream shown;
      shown << *value;
      text += fmt::format(" = {}", shown.str());
    }
  }
  std::string returns;
  for (auto& r : schema.returns()) returns += plain(r.type()->annotation_str());
  return fmt::format("({}) -> {}", text, returns);
}

void compare_classes(const std::string& path, const c10::ClassTypePtr& a, const c10::ClassTypePtr& b,
                     std::vector<std::string>& out) {
  auto where = path.empty() ? std::string("the model") : fmt::format("'{}'", path);
  // An exported program's nodes say what class a module is; one that no node is left of is a Module.
  const bool known = a->name()->name() != "Module" && b->name()->name() != "Module";
  if (known && a->name()->name() != b->name()->name())
    out.push_back(fmt::format("Module {} is a {} in the first model and a {} in the second.", where, a->name()->name(),
                              b->name()->name()));
  auto methods = [](const c10::ClassTypePtr& t) {
    std::map<std::string, std::string> m;
    for (auto* f : t->methods())
      if (!is_added_name(f->name())) m[f->name()] = signature(*f);
    return m;
  };
  auto ma = methods(a), mb = methods(b);
  for (auto& [name, text] : ma) {
    if (auto it = mb.find(name); it == mb.end())
      out.push_back(fmt::format("Method '{}' of {} is only in the first model.", name, where));
    else if (it->second != text)
      out.push_back(fmt::format("Method '{}' of {} is {} in the first model and {} in the second.", name, where, text,
                                it->second));
  }
  for (auto& [name, _] : mb)
    if (!ma.contains(name)) out.push_back(fmt::format("Method '{}' of {} is only in the second model.", name, where));
  auto constants = [](const c10::ClassTypePtr& t) {
    std::map<std::string, IValue> m;
    for (size_t i = 0; i < t->numConstants(); ++i) m[t->getConstantName(i)] = t->getConstant(i);
    return m;
  };
  auto ca = constants(a), cb = constants(b);
  for (auto& [name, value] : ca) {
    auto it = cb.find(name);
    if (it == cb.end() || !same_attribute(value, it->second))
      out.push_back(fmt::format("Constant '{}' of {} differs.", name, where));
  }
  for (auto& [name, _] : cb)
    if (!ca.contains(name)) out.push_back(fmt::format("Constant '{}' of {} is only in the second model.", name, where));
  if (a->getForwardHooks().size() != b->getForwardHooks().size() ||
      a->getForwardPreHooks().size() != b->getForwardPreHooks().size())
    out.push_back(fmt::format("Forward hooks of {} differ.", where));
}

void compare_objects(const std::string& path, const Module& a, const Module& b, std::vector<std::string>& out,
                     std::set<std::pair<const void*, const void*>>& seen) {
  if (!seen.insert({a._ivalue().get(), b._ivalue().get()}).second) return;
  auto ta = a.type(), tb = b.type();
  compare_classes(path, ta, tb, out);
  auto name_of = [&](const std::string& n) { return path.empty() ? n : fmt::format("{}.{}", path, n); };
  for (size_t i = 0; i < tb->numAttributes(); ++i)
    if (auto& n = tb->getAttributeName(i); !is_added_name(n) && !ta->findAttributeSlot(n))
      out.push_back(fmt::format("{} '{}' is only in the second model.",
                                tb->getAttribute(i)->is_module() ? "Module" : "Attribute", name_of(n)));
  for (size_t i = 0; i < ta->numAttributes(); ++i) {
    auto& n = ta->getAttributeName(i);
    if (is_added_name(n)) continue;
    auto slot = tb->findAttributeSlot(n);
    if (!slot) {
      out.push_back(fmt::format("{} '{}' is only in the first model.",
                                ta->getAttribute(i)->is_module() ? "Module" : "Attribute", name_of(n)));
      continue;
    }
    auto &x = a._ivalue()->slots()[i], &y = b._ivalue()->slots()[*slot];
    if (ta->getAttribute(i)->is_module() && tb->getAttribute(*slot)->is_module())
      compare_objects(name_of(n), Module(x.toObject()), Module(y.toObject()), out, seen);
    else if (x.isTensor() && y.isTensor())
      continue;  // parameters and buffers are compared by themselves
    else if (!same_attribute(x, y))
      out.push_back(n == "training" ? fmt::format("The training flag of {} differs.",
                                                  path.empty() ? "the model" : fmt::format("'{}'", path))
                                    : fmt::format("Attribute '{}' differs.", name_of(n)));
  }
}

// Which module paths are one and the same object.
std::vector<std::string> shared_modules(const Module& m) {
  std::unordered_map<const void*, std::string> first;
  std::vector<std::string> out;
  for (const auto& n : m.named_modules())
    out.push_back(fmt::format("{}={}", n.name, first.try_emplace(n.value._ivalue().get(), n.name).first->second));
  return out;
}

}  // namespace

std::vector<std::string> state_differences(const Module& a, const Module& b) {
  std::vector<std::string> out;
  auto pa = entries(a, true), pb = entries(b, true), ba = entries(a, false), bb = entries(b, false);
  compare_tensors("Parameter", pa, pb, false, out);
  compare_tensors("Buffer", ba, bb, false, out);
  if (!out.empty()) return out;
  pa.insert(pa.end(), ba.begin(), ba.end());
  pb.insert(pb.end(), bb.begin(), bb.end());
  auto sa = sharing(pa), sb = sharing(pb);
  for (size_t i = 0; i < sa.size(); ++i)
    if (sa[i] != sb[i])
      out.push_back(fmt::format("'{}' shares its memory with '{}' in the {} model alone.", pa[i].name,
                                sa[i] != pa[i].name ? sa[i] : sb[i], sa[i] != pa[i].name ? "first" : "second"));
  return out;
}

std::vector<std::string> structure_differences(const Module& a, const Module& b, bool* state_equal) {
  auto out = state_differences(a, b);
  if (state_equal) *state_equal = out.empty();
  if (out.empty()) compare_tensors("Parameter", entries(a, true), entries(b, true), true, out);
  std::set<std::pair<const void*, const void*>> seen;
  compare_objects("", a, b, out, seen);
  if (shared_modules(a) != shared_modules(b) && out.empty())
    out.push_back("Submodules are shared in one model and not in the other.");
  return out;
}

}  // namespace tsmem
