#include "rewriter/measure/inputs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "rewriter/error.h"
#include "rewriter/file/archive.h"
#include "rewriter/file/check_file.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/text.h"

namespace tsmem {
namespace {

using c10::IValue;
using c10::TypeKind;

const std::vector<std::pair<std::string, at::ScalarType>>& dtypes() {
  static const std::vector<std::pair<std::string, at::ScalarType>> all = {
      {"f32", at::kFloat}, {"f64", at::kDouble}, {"bf16", at::kBFloat16}, {"f16", at::kHalf}, {"i64", at::kLong},
      {"i32", at::kInt},   {"i16", at::kShort},  {"i8", at::kChar},       {"u8", at::kByte},  {"bool", at::kBool}};
  return all;
}

[[noreturn]] void bad_spec(const std::string& spec, const std::string& why) {
  throw Error(
      ErrorKind::request,
      fmt::format(
          "The input {} can't be read: {}; an input looks like 8x3x224x224, 4x128:i64[0,30522), 8x3x224x224:bf16, "
          "3:int, 0.5:float, true:bool or @file.pt.",
          spec.empty() ? "''" : spec, why));
}

template <class T>
bool number(std::string_view s, T& out) {
  auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), out);
  return !s.empty() && error == std::errc() && end == s.data() + s.size();
}

struct Spec {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  std::optional<std::pair<double, double>> range;
};

IValue scalar(const std::string& spec, const std::string& value, const std::string& kind) {
  if (kind == "int") {
    int64_t i = 0;
    if (!number(value, i)) bad_spec(spec, fmt::format("'{}' is not a whole number", value));
    return i;
  }
  if (kind == "float") {
    double d = 0;
    if (!number(value, d)) bad_spec(spec, fmt::format("'{}' is not a number", value));
    return d;
  }
  if (value != "true" && value != "false") bad_spec(spec, fmt::format("'{}' is neither true nor false", value));
  return value == "true";
}

std::vector<int64_t> parse_shape(const std::string& spec, const std::string& text) {
  std::vector<int64_t> shape;
  if (text == "()") return shape;
  size_t from = 0;
  while (true) {
    size_t to = std::min(text.find('x', from), text.size());
    int64_t d = 0;
    std::string part = text.substr(from, to - from);
    if (!number(part, d) || d < 0)
      bad_spec(spec, part.empty() ? "a dimension is missing" : fmt::format("'{}' is not a dimension", part));
    shape.push_back(d);
    if (to == text.size()) return shape;
    from = to + 1;
  }
}

Spec parse_tensor(const std::string& spec, const std::string& shape, std::string dtype) {
  Spec s;
  if (size_t open = dtype.find('['); open != std::string::npos) {
    std::string range = dtype.substr(open);
    dtype = strip(dtype.substr(0, open));
    size_t comma = range.find(',');
    double lo = 0, hi = 0;
    if (comma == std::string::npos || range.back() != ')' || !number(strip(range.substr(1, comma - 1)), lo) ||
        !number(strip(range.substr(comma + 1, range.size() - comma - 2)), hi) || !std::isfinite(lo) ||
        !std::isfinite(hi))
      bad_spec(spec, fmt::format("'{}' is not a range [low,high)", range));
    if (!(lo < hi)) bad_spec(spec, fmt::format("the range {} is empty", range));
    s.range = {lo, hi};
  }
  s.shape = parse_shape(spec, shape);
  if (dtype.empty() && s.range) dtype = "f32";
  auto it = std::find_if(dtypes().begin(), dtypes().end(), [&](auto& d) { return d.first == dtype; });
  if (it == dtypes().end()) {
    std::string names;
    for (auto& [name, _] : dtypes()) names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
    if (dtype == "int" || dtype == "float")
      bad_spec(spec, fmt::format("{} is for a single number, a tensor takes one of {}", dtype, names));
    bad_spec(spec, fmt::format("'{}' is not a dtype (one of {})", dtype, names));
  }
  s.dtype = it->second;
  if (s.range && s.dtype == at::kBool) bad_spec(spec, "a bool takes no range");
  if (s.range && c10::isIntegralType(s.dtype, false)) {
    auto [lo, hi] = *s.range;
    if (lo != std::floor(lo) || hi != std::floor(hi)) bad_spec(spec, "the range of whole numbers has fractions");
    double least = 0, most = 255;
    if (s.dtype != at::kByte) {
      most = std::ldexp(1.0, static_cast<int>(8 * c10::elementSize(s.dtype)) - 1) - 1;
      least = -most - 1;
    }
    if (lo < least || hi - 1 > most) bad_spec(spec, fmt::format("the range does not fit {}", dtype));
  }
  return s;
}

at::Tensor draw(const Spec& s, at::Generator& generator, bool meta) {
  auto options = at::TensorOptions().dtype(s.dtype);
  if (meta) return at::empty(s.shape, options.device(at::kMeta));
  if (c10::isFloatingType(s.dtype)) {
    // Low-precision inputs are the rounded values of the float32 ones.
    auto t = at::empty(s.shape, options.dtype(s.dtype == at::kDouble ? at::kDouble : at::kFloat));
    if (s.range)
      t.uniform_(s.range->first, s.range->second, generator);
    else
      t.normal_(0, 1, generator);
    return t.to(s.dtype);
  }
  auto [lo, hi] = s.range.value_or(s.dtype == at::kByte ? std::pair{0.0, 256.0} : std::pair{0.0, 2.0});
  // 2^63 is no int64_t: the largest upper end is one less.
  double most = std::nextafter(std::ldexp(1.0, 63), 0.0);
  auto t = at::empty(s.shape, options.dtype(at::kLong));
  t.random_(static_cast<int64_t>(lo), static_cast<int64_t>(std::min(hi, most)), generator);
  return t.to(s.dtype);
}

IValue load_pickle(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::exists(path, error)) throw Error(ErrorKind::input, fmt::format("The input file {} does not exist.", path));
  if (!fs::is_regular_file(path, error))
    throw Error(ErrorKind::input, fmt::format("The input file {} is not a file.", path));
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) throw Error(ErrorKind::input, fmt::format("The input file {} can't be read.", path));
  if (bytes.size() < 4 || std::string_view(bytes.data(), 2) != "PK")
    throw Error(ErrorKind::input,
                fmt::format("The input file {} is not a file of torch.save in its zip format; save the "
                            "inputs with torch.save(inputs, path).",
                            path));
  const auto archive = read_archive(path, "a file of torch.save");
  const Reading reading(path, archive);
  check_records(path, archive, /*tensors_alone=*/true);
  try {
    return torch::jit::pickle_load(bytes);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::input,
                fmt::format("The input file {} can't be read ({}); it may hold tensors, numbers, strings "
                            "and None in lists, tuples and plain dicts.",
                            path, sentence(e)));
  }
}

std::string file_of(const std::string& at_path) { return at_path.starts_with("@") ? at_path.substr(1) : at_path; }

IValue to_device(const IValue& value, c10::Device device) {
  return map_tensors(value, [&](const at::Tensor& t) { return t.detach().to(device); });
}

std::string type_name(const c10::TypePtr& t) {
  if (auto optional = t->cast<c10::OptionalType>())
    return fmt::format("Optional[{}]", type_name(optional->getElementType()));
  return t->annotation_str();
}

std::string value_name(const IValue& v) {
  if (v.isTensor()) return "a tensor";
  if (v.isInt()) return "an int";
  if (v.isDouble()) return "a float";
  if (v.isBool()) return "a bool";
  if (v.isString()) return "a string";
  if (v.isNone()) return "None";
  if (v.isList()) return "a list";
  if (v.isTuple()) return "a tuple";
  if (v.isGenericDict()) return "a dict";
  return v.tagKind();
}

// The value typed as `type`, or nothing; `why` says what was wrong, and where inside of it.
std::optional<IValue> fit(const IValue& v, const c10::TypePtr& type, const std::string& where, std::string& why) {
  auto no = [&]() -> std::optional<IValue> {
    why = fmt::format("{} wants {} and got {}", where, type_name(type), value_name(v));
    return {};
  };
  switch (type->kind()) {
    case TypeKind::AnyType:
      return v;
    case TypeKind::NoneType:
      return v.isNone() ? std::optional(v) : no();
    case TypeKind::TensorType:
      return v.isTensor() ? std::optional(v) : no();
    case TypeKind::IntType:
      return v.isInt() ? std::optional(v) : no();
    case TypeKind::BoolType:
      return v.isBool() ? std::optional(v) : no();
    case TypeKind::StringType:
      return v.isString() ? std::optional(v) : no();
    case TypeKind::ComplexType:
      return v.isComplexDouble() ? std::optional(v) : no();
    case TypeKind::NumberType:
      return v.isScalar() ? std::optional(v) : no();
    case TypeKind::FloatType:
      if (v.isInt()) return IValue(static_cast<double>(v.toInt()));
      return v.isDouble() ? std::optional(v) : no();
    case TypeKind::OptionalType:
      if (v.isNone()) return v;
      return fit(v, type->expectRef<c10::OptionalType>().getElementType(), where, why);
    case TypeKind::UnionType:
      for (auto& t : type->expectRef<c10::UnionType>().containedTypes())
        if (auto got = fit(v, t, where, why)) return got;
      return no();
    case TypeKind::ListType: {
      if (!v.isList() && !v.isTuple()) return no();
      auto element = type->expectRef<c10::ListType>().getElementType();
      c10::impl::GenericList out(element);
      auto elements = v.isList() ? std::vector<IValue>(v.toListRef().begin(), v.toListRef().end())
                                 : v.toTupleRef().elements().vec();
      for (size_t i = 0; i < elements.size(); ++i) {
        auto got = fit(elements[i], element, fmt::format("{}[{}]", where, i), why);
        if (!got) return {};
        out.push_back(*got);
      }
      return out;
    }
    case TypeKind::TupleType: {
      if (!v.isList() && !v.isTuple()) return no();
      auto tuple = type->expect<c10::TupleType>();
      auto elements = v.isList() ? std::vector<IValue>(v.toListRef().begin(), v.toListRef().end())
                                 : v.toTupleRef().elements().vec();
      if (elements.size() != tuple->elements().size()) {
        why = fmt::format("{} wants {} elements ({}) and got {}", where, tuple->elements().size(), type_name(type),
                          elements.size());
        return {};
      }
      for (size_t i = 0; i < elements.size(); ++i) {
        auto got = fit(elements[i], tuple->elements()[i], fmt::format("{}[{}]", where, i), why);
        if (!got) return {};
        elements[i] = *got;
      }
      return tuple->schema() ? c10::ivalue::Tuple::createNamed(std::move(elements), tuple)
                             : c10::ivalue::Tuple::create(std::move(elements));
    }
    case TypeKind::DictType: {
      if (!v.isGenericDict()) return no();
      auto& dict = type->expectRef<c10::DictType>();
      c10::impl::GenericDict out(dict.getKeyType(), dict.getValueType());
      for (auto& e : v.toGenericDict()) {
        auto key = fit(e.key(), dict.getKeyType(), fmt::format("a key of {}", where), why);
        if (!key) return {};
        auto name = e.key().isString() ? fmt::format("{}['{}']", where, e.key().toStringRef())
                                       : fmt::format("a value of {}", where);
        auto value = fit(e.value(), dict.getValueType(), name, why);
        if (!value) return {};
        out.insert(*key, *value);
      }
      return out;
    }
    case TypeKind::DeviceObjType:
      return v.isDevice() ? std::optional(v) : no();
    default:
      return no();
  }
}

std::string plural(size_t n, const std::string& noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

}  // namespace

std::vector<IValue> make_inputs(const std::vector<std::string>& specs, const std::string& inputs_file, uint64_t seed,
                                const std::string& device) {
  if (device != "meta") require_device(device);
  c10::Device target(device);
  std::vector<IValue> out;
  if (!inputs_file.empty()) {
    auto path = file_of(inputs_file);
    auto value = load_pickle(path);
    if (value.isTuple())
      out = value.toTupleRef().elements().vec();
    else if (value.isList())
      out.assign(value.toListRef().begin(), value.toListRef().end());
    else
      throw Error(ErrorKind::input,
                  fmt::format("The input file {} holds {}, and not a tuple of all arguments; a single "
                              "one is given as @{}.",
                              path, value_name(value), path));
    for (auto& v : out) v = to_device(v, target);
    return out;
  }
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& full : specs) {
    const std::string spec(strip(full));
    if (spec.starts_with("@")) {
      if (spec.size() == 1) bad_spec(full, "a file name is missing");
      out.push_back(to_device(load_pickle(file_of(spec)), target));
      continue;
    }
    size_t colon = spec.find(':');
    std::string head(strip(spec.substr(0, colon))), tail;
    if (colon != std::string::npos) tail = strip(spec.substr(colon + 1));
    if (colon != std::string::npos && tail.empty()) bad_spec(full, "a dtype is missing after the colon");
    bool one = head.find('x') == std::string::npos && head != "()";
    if (one && (tail == "int" || tail == "float" || (tail == "bool" && (head == "true" || head == "false")))) {
      out.push_back(scalar(full, head, tail));
      continue;
    }
    if (size_t open = head.find('['); colon == std::string::npos && open != std::string::npos) {
      tail = head.substr(open);
      head = strip(head.substr(0, open));
    }
    auto s = parse_tensor(full, head, tail.empty() ? "f32" : tail);
    double bytes =
        static_cast<double>(std::max<size_t>(c10::elementSize(s.dtype), c10::isFloatingType(s.dtype) ? 4 : 8));
    for (auto d : s.shape) bytes *= static_cast<double>(d);
    try {
      if (bytes > std::ldexp(1.0, 60)) throw std::bad_alloc();
      out.push_back(to_device(draw(s, generator, target.is_meta()), target));
    } catch (const std::exception&) {
      throw Error(ErrorKind::input, fmt::format("The input {} takes {:.1f} GiB, more memory than there is.", full,
                                                bytes / std::ldexp(1.0, 30)));
    }
  }
  return out;
}

std::vector<IValue> check_inputs(const torch::jit::Module& module, const std::string& method,
                                 const std::vector<IValue>& inputs) {
  auto found = module.find_method(method);
  if (!found) {
    std::string names;
    for (auto& m : module.get_methods())
      if (!is_added_name(m.name())) names += fmt::format("{}{}", names.empty() ? "" : ", ", m.name());
    throw Error(ErrorKind::request, fmt::format("The model has no method '{}'{}.", method,
                                                names.empty() ? std::string() : fmt::format("; it has {}", names)));
  }
  auto& all = found->function().getSchema().arguments();
  std::vector<c10::Argument> arguments(all.begin() + 1, all.end());  // the first is the module itself
  std::string list;
  size_t needed = 0;
  for (auto& a : arguments) {
    list += fmt::format("{}{}: {}{}", list.empty() ? "" : ", ", a.name(), type_name(a.type()),
                        a.default_value() ? " (optional)" : "");
    if (!a.default_value()) ++needed;
  }
  auto takes =
      fmt::format("{} takes {}{}", method, arguments.empty() ? "no arguments" : plural(arguments.size(), "argument"),
                  arguments.empty() ? std::string() : fmt::format(" ({})", list));
  if (inputs.size() < needed || inputs.size() > arguments.size())
    throw Error(ErrorKind::input,
                fmt::format("{}, and {} given; give one input for each.", takes,
                            inputs.empty() ? "none was"
                                           : plural(inputs.size(), "input") + (inputs.size() == 1 ? " was" : " were")));
  std::vector<IValue> out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::string why;
    auto got = fit(inputs[i], arguments[i].type(), fmt::format("argument '{}'", arguments[i].name()), why);
    if (!got) throw Error(ErrorKind::input, fmt::format("{}: {}.", takes, why));
    out.push_back(*got);
  }
  return out;
}

void require_device(const std::string& device) {
  std::optional<c10::Device> d;
  try {
    d = c10::Device(device);
  } catch (const std::exception&) {
  }
  if (!d || (!d->is_cpu() && !d->is_cuda()))
    throw Error(ErrorKind::request, fmt::format("'{}' is not a device; use cpu, cuda or cuda:N.", device));
  if (d->is_cpu()) return;
  // The tool links LibTorch's CPU part alone, so that it starts without CUDA; its CUDA part registers itself when
  // loaded. Before anybody asks LibTorch about CUDA: it looks for that part once, and remembers.
  dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  auto count = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  if (count == 0)
    throw Error(
        ErrorKind::request,
        fmt::format("The device {} can't be used: LibTorch finds no CUDA device on this machine; use cpu.", device));
  if (d->has_index() && d->index() >= count)
    throw Error(ErrorKind::request, fmt::format("The device {} can't be used: this machine has {}, counted from 0.",
                                                device, plural(count, "CUDA device")));
  at::globalContext().lazyInitDevice(c10::kCUDA);
}

}  // namespace tsmem
