#include "rewriter/graph/exported_schema.h"

#include <array>
#include <utility>

namespace tsmem {

using nlohmann::json;

namespace {

constexpr std::array<std::pair<int, c10::ScalarType>, 18> kDtypes = {{
    {1, c10::kByte},
    {2, c10::kChar},
    {3, c10::kShort},
    {4, c10::kInt},
    {5, c10::kLong},
    {6, c10::kHalf},
    {7, c10::kFloat},
    {8, c10::kDouble},
    {9, c10::kComplexHalf},
    {10, c10::kComplexFloat},
    {11, c10::kComplexDouble},
    {12, c10::kBool},
    {13, c10::kBFloat16},
    {28, c10::kUInt16},
    {29, c10::kFloat8_e4m3fn},
    {30, c10::kFloat8_e5m2},
    {31, c10::kFloat8_e4m3fnuz},
    {32, c10::kFloat8_e5m2fnuz},
}};

constexpr std::array<std::pair<int, c10::Layout>, 7> kLayouts = {{
    {1, c10::kSparse},
    {2, c10::kSparseCsr},
    {3, c10::kSparseCsc},
    {4, c10::kSparseBsr},
    {5, c10::kSparseBsc},
    {6, c10::kMkldnn},
    {7, c10::kStrided},
}};

constexpr std::array<std::pair<int, c10::MemoryFormat>, 4> kFormats = {{
    {1, c10::MemoryFormat::Contiguous},
    {2, c10::MemoryFormat::ChannelsLast},
    {3, c10::MemoryFormat::ChannelsLast3d},
    {4, c10::MemoryFormat::Preserve},
}};

template <class Table>
int64_t from_exported(const Table& table, int64_t exported) {
  for (const auto& [number, own] : table)
    if (number == exported) return static_cast<int64_t>(own);
  return -1;
}

template <class Table>
int64_t to_exported(const Table& table, int64_t own) {
  for (const auto& [number, mine] : table)
    if (static_cast<int64_t>(mine) == own) return number;
  return -1;
}

}  // namespace

c10::ScalarType dtype_of(int64_t exported) {
  const int64_t own = from_exported(kDtypes, exported);
  return own < 0 ? c10::ScalarType::Undefined : static_cast<c10::ScalarType>(own);
}
int64_t exported_dtype(c10::ScalarType dtype) { return to_exported(kDtypes, static_cast<int64_t>(dtype)); }
int64_t layout_of(int64_t exported) { return from_exported(kLayouts, exported); }
int64_t exported_layout(int64_t layout) { return to_exported(kLayouts, layout); }
int64_t memory_format_of(int64_t exported) { return from_exported(kFormats, exported); }
int64_t exported_memory_format(int64_t format) { return to_exported(kFormats, format); }

void for_each_name(json& argument, const std::function<void(json& name)>& f) {
  if (!argument.is_object()) return;
  for (auto& [kind, value] : argument.items()) {
    if (kind == "as_tensor" || kind == "as_custom_obj") {
      f(value["name"]);
    } else if (kind == "as_tensors") {
      for (json& tensor : value) f(tensor["name"]);
    } else if (kind == "as_nested_tensors") {
      for (json& list : value)
        for (json& tensor : list) f(tensor["name"]);
    } else if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") {
      if (value.contains("as_name")) f(value["as_name"]);
    } else if (kind == "as_sym_ints" || kind == "as_sym_floats" || kind == "as_sym_bools") {
      for (json& number : value)
        if (number.contains("as_name")) f(number["as_name"]);
    } else if (kind == "as_optional_tensor") {
      for_each_name(value, f);
    } else if (kind == "as_optional_tensors") {
      for (json& tensor : value) for_each_name(tensor, f);
    } else if (kind == "as_string_to_argument") {
      for (auto& [key, inner] : value.items()) for_each_name(inner, f);
    }
  }
}

void for_each_name(const json& argument, const std::function<void(const std::string& name)>& f) {
  for_each_name(const_cast<json&>(argument), [&](json& name) { f(name.get_ref<const std::string&>()); });
}

std::vector<std::string> names_in(const json& arguments) {
  std::vector<std::string> names;
  for (const json& argument : arguments)
    for_each_name(argument.contains("arg") ? argument["arg"] : argument,
                  [&](const std::string& name) { names.push_back(name); });
  return names;
}

OperatorOverload operator_of(const std::string& target) {
  static const std::string prefix = "torch.ops.";
  if (!target.starts_with(prefix)) return {};
  const size_t space = target.find('.', prefix.size());
  const size_t dot = space == std::string::npos ? space : target.find('.', space + 1);
  if (dot == std::string::npos) return {};
  const std::string overload = target.substr(dot + 1);
  return {target.substr(prefix.size(), space - prefix.size()) + "::" + target.substr(space + 1, dot - space - 1),
          overload == "default" ? "" : overload};
}

std::string target_of(const OperatorOverload& op) {
  std::string name = op.name;
  name.replace(name.find("::"), 2, ".");
  return "torch.ops." + name + "." + (op.overload.empty() ? "default" : op.overload);
}

}  // namespace tsmem
