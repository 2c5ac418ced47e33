#include "rewriter/compare/value_text.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace tsmem {

std::string unmangled(std::string name) {
  for (size_t at; (at = name.find("___torch_mangle_")) != name.npos;) {
    size_t dot = name.find('.', at);
    name.erase(at, dot == name.npos ? name.npos : dot + 1 - at);
  }
  for (size_t at; (at = name.find("__torch__.")) != name.npos;) name.erase(at, 10);
  return name;
}

std::string real_text(double value) {
  auto text = fmt::format("{}", value);
  return text.find_first_not_of("-0123456789") == text.npos ? text + ".0" : text;
}

std::string tensor_text(const at::Tensor& t) {
  if (!t.defined()) return "Tensor()";
  std::string text = fmt::format("Tensor({}{}", c10::toString(t.scalar_type()), c10::str(t.sizes()));
  if (t.is_meta() || t.layout() != c10::kStrided || t.is_quantized()) return text + ")";
  auto plain = t.detach().cpu().contiguous();
  if (plain.numel() <= 8 && !plain.is_complex()) {
    auto values = plain.to(at::kDouble);
    for (int64_t i = 0; i < values.numel(); ++i)
      text += (i ? ", " : ": ") + fmt::format("{}", values.data_ptr<double>()[i]);
    return text + ")";
  }
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  auto bytes = static_cast<const unsigned char*>(plain.data_ptr());
  for (size_t i = 0; i < plain.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return fmt::format("{}, #{:016x})", text, hash);
}

std::string constant_text(const c10::IValue& value) {
  auto sequence = [](const auto& items, char open, char close) {
    std::string text(1, open);
    bool first = true;
    for (const c10::IValue& item : items) {
      text += (first ? "" : ", ") + constant_text(item);
      first = false;
    }
    return text + close;
  };
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isDouble()) return real_text(value.toDouble());
  if (value.isTensor()) return tensor_text(value.toTensor());
  if (value.isString())
    return nlohmann::json(value.toStringRef()).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (value.isList()) return sequence(value.toListRef(), '[', ']');
  if (value.isTuple()) return sequence(value.toTupleRef().elements(), '(', ')');
  if (value.isObject()) return unmangled(value.type()->annotation_str());
  return unmangled(c10::str(value));
}

}  // namespace tsmem
