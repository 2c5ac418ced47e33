#include "rewriter/file/check_file.h"

#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <memory>
#include <unordered_set>

#include "rewriter/error.h"
#include "rewriter/file/crc32.h"
#include "rewriter/file/nesting.h"
#include "rewriter/file/pickle.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/rewrite/added_names.h"

namespace tsmem {

void (*on_reading)(const char* path, int seconds, uint64_t bytes) = nullptr;

namespace {

using added_names::kAmp, added_names::kOriginal, added_names::kRecompute;
using torch::jit::Module;

bool is_code(const std::string& name) { return name.starts_with("code/") && name.ends_with(".py"); }
bool is_debug(const std::string& name) { return name.starts_with("code/") && name.ends_with(".debug_pkl"); }

// What is wrong in code or a pickle, as half a sentence; "" where nothing is.
std::string fault_in(const std::string& name, const std::string& bytes, const Archive& archive) {
  if (is_code(name)) return nesting_fault(bytes);
  if (is_debug(name)) return debug_fault(bytes);
  const auto folder = name.substr(0, name.find('.')) + "/";
  return pickle_fault(bytes, [&](const std::string& key) -> std::optional<uint64_t> {
    auto record = archive.records.find(folder + key);
    if (record == archive.records.end()) return {};
    return record->second.size;
  });
}

// torch.save can leave checksums out (torch.serialization.set_crc32_options): zeros stand in their place.
bool has_checksums(const Archive& archive) {
  return std::any_of(archive.records.begin(), archive.records.end(), [](auto& r) { return r.second.crc != 0; });
}

}  // namespace

void check_records(const std::string& path, const Archive& archive, bool tensors_alone) {
  const bool checksums = has_checksums(archive);
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader;  // inflates
  for (auto& [name, record] : archive.records) {
    const auto damaged = [&, &name = name](const std::string& why) {
      return Error(ErrorKind::input, "'" + path + "' is damaged: " + why + "; copy or save it again.");
    };
    const bool looked_into =
        name == "data.pkl" || (!tensors_alone && (name == "constants.pkl" || is_code(name) || is_debug(name)));
    std::string bytes;
    uint32_t crc = 0;
    if (record.method != 0) {
      try {
        if (!reader) reader = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
        auto [data, size] = reader->getRecord(name);
        bytes.assign(static_cast<const char*>(data.get()), size);
      } catch (const c10::Error&) {
        throw damaged("record '" + name + "' can't be unpacked");
      }
      if (bytes.size() != record.size) throw damaged("record '" + name + "' has another size than its directory says");
      crc = crc32(0, bytes.data(), bytes.size());
    } else if (looked_into) {
      bytes = read_record(path, record);
      crc = crc32(0, bytes.data(), bytes.size());
    } else if (checksums) {
      crc = checksum(path, record);
    }
    if (checksums && crc != record.crc)
      throw damaged("the bytes of record '" + name + "' are not those that were written (its CRC-32 is another)");
    if (!looked_into) continue;
    if (auto fault = fault_in(name, bytes, archive); !fault.empty())
      throw Error(ErrorKind::input, "'" + path + "' is damaged, or nothing that PyTorch can read: " + fault +
                                        " (record '" + name + "').");
  }
}

namespace {

bool has_type(const c10::IValue& v, const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return v.isTensor();
    case c10::TypeKind::IntType:
      return v.isInt();
    case c10::TypeKind::FloatType:
      return v.isDouble();
    case c10::TypeKind::BoolType:
      return v.isBool();
    case c10::TypeKind::StringType:
      return v.isString();
    case c10::TypeKind::ListType:
      return v.isList() && std::all_of(v.toListRef().begin(), v.toListRef().end(), [&](const c10::IValue& e) {
               return has_type(e, type->expectRef<c10::ListType>().getElementType());
             });
    case c10::TypeKind::DictType:
      return v.isGenericDict();
    case c10::TypeKind::TupleType: {
      if (!v.isTuple()) return false;
      auto types = type->expectRef<c10::TupleType>().elements();
      auto& elements = v.toTupleRef().elements();
      for (size_t i = 0; i < types.size(); ++i)
        if (i >= elements.size() || !has_type(elements[i], types[i])) return false;
      return types.size() == elements.size();
    }
    case c10::TypeKind::OptionalType:
      return v.isNone() || has_type(v, type->expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ClassType:
      return v.isObject() && *v.toObjectRef().type() == *type;
    default:  // of these PyTorch checks more by itself
      return true;
  }
}

bool is_number(const std::string& text) { return !text.empty() && text.find_first_not_of("0123456789") == text.npos; }

// A name that rewriting adds, of an attribute (an int) or method.
bool added_attribute(const std::string& name, const c10::TypePtr& type) {
  return name.starts_with(kRecompute) && is_number(name.substr(kRecompute.size())) &&
         type->kind() == c10::TypeKind::IntType;
}

bool added_method(const c10::ClassType& type, const torch::jit::Function& method) {
  for (const std::string& prefix : {kOriginal, kAmp})
    if (method.name().starts_with(prefix)) return type.findMethod(method.name().substr(prefix.size())) != nullptr;
  return false;
}

bool same_signature(const c10::FunctionSchema& a, const c10::FunctionSchema& b) {
  if (a.arguments().size() != b.arguments().size() || a.returns().size() != b.returns().size()) return false;
  for (size_t i = 0; i < a.arguments().size(); ++i)
    if (*a.arguments()[i].type() != *b.arguments()[i].type() || a.arguments()[i].name() != b.arguments()[i].name())
      return false;
  for (size_t i = 0; i < a.returns().size(); ++i)
    if (*a.returns()[i].type() != *b.returns()[i].type()) return false;
  return true;
}

}  // namespace

void check_module(const std::string& path, const Module& module) {
  const auto name_of = [](const c10::ClassType& type) { return type.name()->qualifiedName(); };
  const auto reserved = [&](const std::string& what, const c10::ClassType& type) {
    return Error(ErrorKind::input, "'" + path + "' has " + what + " in " + name_of(type) +
                                       ": names that begin with _tsmem_ are reserved for what tsmem adds; rename it.");
  };
  // LibTorch makes a tensor with any zero point, without a quantizer, or of any indices, and says what is wrong, or
  // reads elsewhere, when it is used.
  const auto check_values = [&](const c10::IValue& value, const std::string& name) {
    for (const auto& t : all_tensors(value)) {
      if (t.is_meta()) continue;
      if (t.is_quantized())
        on_users_values("'" + path + "' is damaged: the quantized tensor '" + name + "' has no values",
                        [&] { t.dequantize(); });
      else if (t.is_sparse())
        on_users_values("'" + path + "' is damaged: the sparse tensor '" + name + "' has indices that it can't have",
                        [&] { at::_validate_sparse_coo_tensor_args(t._indices(), t._values(), t.sizes()); });
    }
  };
  std::unordered_set<const void*> objects;
  std::unordered_set<const c10::ClassType*> classes;
  std::vector<Module> todo{module};
  while (!todo.empty()) {
    const auto object = todo.back()._ivalue();
    todo.pop_back();
    if (!objects.insert(object.get()).second) continue;
    const auto type = object->type();
    if (object->slots().size() < type->numAttributes())
      throw Error(ErrorKind::input, "'" + path + "' is damaged: an object of " + name_of(*type) + " lacks attributes.");
    for (size_t i = 0; i < type->numAttributes(); ++i) {
      const c10::IValue& value = object->getSlot(i);
      if (!has_type(value, type->getAttribute(i)))
        throw Error(ErrorKind::input, "'" + path + "' is damaged: attribute '" + type->getAttributeName(i) + "' of " +
                                          name_of(*type) + " is not of type " +
                                          type->getAttribute(i)->annotation_str() + ".");
      if (value.isModule())
        todo.emplace_back(value.toObject());
      else
        check_values(value, type->getAttributeName(i));
    }
    if (!classes.insert(type.get()).second) continue;
    for (size_t i = 0; i < type->numAttributes(); ++i)
      if (const auto& name = type->getAttributeName(i);
          is_added_name(name) && !added_attribute(name, type->getAttribute(i)))
        throw reserved(
            std::string(type->getAttribute(i)->is_module() ? "a submodule" : "an attribute") + " '" + name + "'",
            *type);
    for (const auto* method : type->methods()) {
      if (!is_added_name(method->name())) continue;
      if (!added_method(*type, *method)) throw reserved("a method '" + method->name() + "'", *type);
      if (!method->name().starts_with(kOriginal)) continue;
      const std::string original = method->name().substr(kOriginal.size());
      if (!same_signature(method->getSchema(), type->findMethod(original)->getSchema()))
        throw Error(ErrorKind::input, "'" + path + "' is damaged: " + name_of(*type) + " has a method '" +
                                          method->name() + "' whose signature is not that of '" + original + "'.");
    }
  }
}

int reading_seconds(const Archive& archive) {
  uint64_t code = 0, all = 0;  // bytes, as stored
  for (auto& [name, record] : archive.records) {
    all += record.size;
    if (name.starts_with("code/") || name.ends_with(".pkl")) code += record.stored_size;
  }
  return static_cast<int>(std::min<uint64_t>(10 + code / 200'000 + all / 50'000'000, 100'000));
}

Reading::Reading(const std::string& path, const Archive& archive) {
  uint64_t bytes = 0;
  for (auto& [name, record] : archive.records) bytes += record.size;
  if (on_reading) on_reading(path.c_str(), reading_seconds(archive), bytes);
}
Reading::~Reading() {
  if (on_reading) on_reading(nullptr, 0, 0);
}

}  // namespace tsmem
