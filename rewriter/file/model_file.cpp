#include "rewriter/file/model_file.h"

#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>
#include <set>

#include "rewriter/error.h"
#include "rewriter/file/archive.h"
#include "rewriter/file/check_file.h"
#include "rewriter/file/new_file.h"
#include "rewriter/file/op_library.h"
#include "rewriter/graph/exported_program.h"
#include "rewriter/graph/inline_regions.h"
#include "rewriter/graph/mode_blocks.h"

namespace tsmem {
namespace fs = std::filesystem;
namespace {

// What stands in `text` between `before` and the first character of `stop`; "" where `before` doesn't occur.
std::string between(const std::string& text, const std::string& before, const std::string& stop) {
  auto begin = text.find(before);
  if (begin == text.npos) return "";
  begin += before.size();
  return text.substr(begin, text.find_first_of(stop, begin) - begin);
}

// What a file of torch.save is, "" for TorchScript.
std::string other_kind(const std::string& path, const Archive& archive) {
  if (archive.has("constants.pkl")) return "";
  auto pickle = archive.records.find("data.pkl");
  if (pickle == archive.records.end()) return "is a zip archive, but not a TorchScript file";
  bool model = read_record(path, pickle->second).find("_modules") != std::string::npos;
  return model ? "is a pickled model written by torch.save, not TorchScript"
               : "is a state_dict or checkpoint written by torch.save, not TorchScript";
}

// The package whose operators or classes a message of torch::jit::load misses, else "".
std::string package_missing_in(const std::string& message) {
  auto package = between(message, "Unknown builtin op: ", ":");
  if (package.empty()) package = between(message, "__torch__.torch.classes.", ".");
  // The message quotes the model's text, which must not say where a library is loaded from.
  const bool name =
      std::all_of(package.begin(), package.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  return name ? package : "";
}

Error load_error(const std::string& path, const std::exception& e) {
  std::string text = e.what();
  auto op = between(text, "Unknown builtin op: ", "\n");
  while (op.ends_with('.')) op.pop_back();
  if (op.starts_with("tsmem::"))
    return Error(ErrorKind::input, "'" + path + "' needs the operator " + op +
                                       ", which tsmem " TSMEM_VERSION
                                       " does not have; use the version of tsmem that wrote it, or a later one.");
  if (!op.empty()) return Error(ErrorKind::input, "'" + path + "' uses the custom operator " + op + ".", "ops");
  auto type = between(text, "__torch__.torch.classes.", " '\"\n:(),");
  if (!type.empty()) return Error(ErrorKind::input, "'" + path + "' uses the custom class " + type + ".", "ops");
  auto why = sentence(e);
  while (why.ends_with('.')) why.pop_back();
  return Error(ErrorKind::input, "PyTorch can't load '" + path + "': " + why + ".");
}

// LibTorch looks at the indices of sparse tensors only where it is asked to.
struct CheckSparse {
  const std::optional<bool> before = at::globalContext().checkSparseTensorInvariants();
  CheckSparse() { at::globalContext().setCheckSparseTensorInvariants(true); }
  ~CheckSparse() { at::globalContext().setCheckSparseTensorInvariants(before); }
};

c10::Device device_named(const std::string& device) {
  try {
    return c10::Device(device);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::request, "'" + device + "' is not a device; use cpu, cuda or cuda:N.");
  }
}

ModelFile load_exported(const std::string& path, const Archive& archive, const c10::Device& device) {
  const Reading reading(path, archive);
  check_records(path, archive, /*tensors_alone=*/true);
  try {
    const auto program = std::make_shared<const ExportedProgram>(with_regions_inline(read_exported(path, archive)));
    ModelFile file{path, module_with_blocks(*program, device, RunBy::program), extra_files_of(*program), program};
    check_module(path, file.module);
    return file;
  } catch (const c10::Error& e) {
    throw load_error(path, e);
  }
}

void write_model(const ModelFile& model, const std::function<size_t(const void*, size_t)>& write) {
  if (model.exported) return write_exported(*model.exported, model.module, model.extra_files, write);
  torch::jit::ExtraFilesMap extra(model.extra_files.begin(), model.extra_files.end());
  torch::jit::ExportModule(model.module, write, extra);
}

}  // namespace

ModelFile load_model(const std::string& path, const std::string& device) {
  auto archive = read_archive(path);
  if (is_exported(archive)) return load_exported(path, archive, device_named(device));
  if (archive.has("model.json"))
    throw Error(ErrorKind::input, "'" + path +
                                      "' is in PyTorch's format from before 1.4, whose tensors can't be checked; load "
                                      "and save it in Python: torch.jit.load(\"model.pt\").save(\"new.pt\").");
  if (auto kind = other_kind(path, archive); !kind.empty())
    throw Error(ErrorKind::input,
                "'" + path + "' " + kind + "; script the model in Python: torch.jit.script(model).save(\"model.pt\").");
  const Reading reading(path, archive);
  check_records(path, archive);
  ModelFile file{path, {}, {}, nullptr};
  for (auto& [name, record] : archive.records)
    if (name.starts_with("extra/")) file.extra_files[name.substr(6)] = "";
  torch::jit::ExtraFilesMap extra(file.extra_files.begin(), file.extra_files.end());
  std::optional<c10::Device> where = device_named(device);
  const CheckSparse check_sparse;
  for (std::set<std::string> tried;;) {
    try {
      file.module = torch::jit::load(path, where, extra);
      break;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const c10::NotImplementedError&) {
      // Quantized and sparse tensors have no meta device: then with weights.
      if (!where->is_meta()) throw;
      where.emplace("cpu");
    } catch (const std::exception& e) {
      auto package = package_missing_in(e.what());
      if (!tried.insert(package).second || !load_op_package(package)) throw load_error(path, e);
    }
  }
  check_module(path, file.module);
  file.extra_files = {extra.begin(), extra.end()};
  return file;
}

PendingModel::PendingModel(const ModelFile& model, const std::string& path, bool force) : force_(force) {
  check_output(path, force);
  file_ = std::make_unique<NewFile>(path);
  write_model(model, [&](const void* data, size_t size) {
    file_->write(data, size);
    return size;
  });
  file_->sync();
  if (fs::file_size(file_->name()) != file_->written())
    throw Error(ErrorKind::input, "Can't write '" + path + "': the file system lost some of it.");
  auto archive = read_archive(file_->name());
  if (model.exported ? !is_exported(archive) : !archive.has("constants.pkl") || !archive.has("data.pkl"))
    throw Error(ErrorKind::input, "Can't write '" + path + "': it reads back incomplete.");
}

PendingModel::PendingModel(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                           const std::string& path, bool force)
    : PendingModel(ModelFile{"", module, extra_files, nullptr}, path, force) {}

PendingModel::~PendingModel() = default;

const std::string& PendingModel::temporary() const { return file_->name(); }

void PendingModel::commit() { file_->rename(force_); }

std::string bytes_of(const ModelFile& model) {
  std::string bytes;
  write_model(model, [&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes;
}

void save_model(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                const std::string& path, bool force) {
  PendingModel(module, extra_files, path, force).commit();
}

}  // namespace tsmem
