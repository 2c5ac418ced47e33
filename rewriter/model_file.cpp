#include "model_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/export.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <set>

#include "archive.h"
#include "error.h"
#include "op_library.h"

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

// What a file of torch.save or torch.export is, "" for TorchScript.
std::string other_kind(const std::string& path, const Archive& archive) {
  if (archive.has("constants.pkl") || archive.has("model.json")) return "";
  if (archive.has("archive_format") || archive.has("models/model.json") ||
      archive.has("serialized_exported_program.json"))
    return "is an archive of torch.export, not TorchScript";
  auto pickle = archive.records.find("data.pkl");
  if (pickle == archive.records.end()) return "is a zip archive, but not a TorchScript file";
  bool model = read_record(path, pickle->second).find("_modules") != std::string::npos;
  return model ? "is a pickled model written by torch.save, not TorchScript"
               : "is a state_dict or checkpoint written by torch.save, not TorchScript";
}

void check_pickles(const std::string& path, const Archive& archive) {
  for (auto& [name, record] : archive.records) {
    if (!name.ends_with(".pkl") || name.starts_with("extra/") || record.method != 0) continue;
    if (auto fault = pickle_fault(read_record(path, record)); !fault.empty())
      throw Error(kBadInput, "'" + path + "' is damaged: " + fault + " ('" + name + "').");
  }
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
    return Error(kBadInput, "'" + path + "' needs the operator " + op +
                                ", which tsmem " TSMEM_VERSION
                                " does not have; use the version of tsmem that wrote it, or a later one.");
  if (!op.empty())
    return Error(kBadInput, "'" + path + "' uses the custom operator " + op +
                                "; name the library that defines it with --ops LIB.so.");
  auto type = between(text, "__torch__.torch.classes.", " '\"\n:(),");
  if (!type.empty())
    return Error(kBadInput, "'" + path + "' uses the custom class " + type +
                                "; name the library that defines it with --ops LIB.so.");
  auto why = sentence(e);
  while (why.ends_with('.')) why.pop_back();
  return Error(kBadInput, "PyTorch can't load '" + path + "': " + why + ".");
}

// Where a temporary file is being written, for remove_temporary_file.
std::atomic<const char*> temporary{nullptr};

// A file beside its target, removed unless it is renamed to it.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : target_(path) {
    // Through a symbolic link its target is written, as every other program does.
    std::error_code ignored;
    if (fs::is_symlink(target_, ignored)) {
      auto resolved = fs::weakly_canonical(target_, ignored);
      if (!ignored) target_ = resolved;
    }
    std::random_device random;
    for (int tries = 0; fd_ < 0 && tries < 100; ++tries) {
      name_ = target_.string() + ".tmp" + std::to_string(random());
      fd_ = open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && errno != EEXIST) break;
    }
    if (fd_ < 0) throw failed(errno);
    temporary = name_.c_str();
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    if (fd_ >= 0) close(fd_);
    if (!done_) unlink(name_.c_str());
    temporary = nullptr;
  }

  // Never fails by itself: PyTorch's writer ends the process when its callback fails. The first error is kept for
  // check().
  void write(const void* data, size_t size) {
    auto at = static_cast<const char*>(data);
    while (size > 0 && error_ == 0) {
      ssize_t n = ::write(fd_, at, std::min<size_t>(size, 1 << 30));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        error_ = n < 0 ? errno : ENOSPC;
      else {
        at += n;
        size -= static_cast<size_t>(n);
        written_ += static_cast<uint64_t>(n);
      }
    }
  }

  void sync() {
    if (error_ == 0 && fsync(fd_) != 0 && errno != EINVAL) error_ = errno;
    if (close(fd_) != 0 && error_ == 0) error_ = errno;
    fd_ = -1;
    check();
  }
  void check() const {
    if (error_ != 0) throw failed(error_);
  }

  void rename(bool replace) {
    if (!replace) {
      // Another program may have made the file since it was looked for.
      if (renameat2(AT_FDCWD, name_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) == 0) return finish();
      if (errno == EEXIST) throw exists(target_.string());
      if (errno != EINVAL && errno != ENOSYS) throw failed(errno);
    }
    if (::rename(name_.c_str(), target_.c_str()) != 0) throw failed(errno);
    finish();
  }

  const std::string& name() const { return name_; }
  uint64_t written() const { return written_; }
  static Error exists(const std::string& path) {
    return Error(kUsage, "'" + path + "' exists already; use --force to replace it.");
  }

 private:
  void finish() {
    done_ = true;
    // The rename itself is on disk once the directory is; not every file system can sync one.
    auto parent = target_.parent_path();
    int directory = open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0) {
      fsync(directory);
      close(directory);
    }
  }
  Error failed(int error) const {
    return Error(kBadInput, "Can't write '" + target_.string() + "': " + std::strerror(error) + ".");
  }

  fs::path target_;
  std::string name_;
  int fd_ = -1, error_ = 0;
  uint64_t written_ = 0;
  bool done_ = false;
};

}  // namespace

ModelFile load_model(const std::string& path, const std::string& device) {
  auto archive = read_archive(path);
  if (auto kind = other_kind(path, archive); !kind.empty())
    throw Error(kBadInput,
                "'" + path + "' " + kind + "; script the model in Python: torch.jit.script(model).save(\"model.pt\").");
  check_pickles(path, archive);
  ModelFile file{path, {}, {}};
  for (auto& [name, record] : archive.records)
    if (name.starts_with("extra/")) file.extra_files[name.substr(6)] = "";
  torch::jit::ExtraFilesMap extra(file.extra_files.begin(), file.extra_files.end());
  std::optional<c10::Device> where;
  try {
    where.emplace(device);
  } catch (const std::exception& e) {
    throw Error(kUsage, "'" + device + "' is not a device; use cpu or cuda.");
  }
  for (std::set<std::string> tried;;) {
    try {
      file.module = torch::jit::load(path, where, extra);
      break;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& e) {
      auto package = package_missing_in(e.what());
      if (!tried.insert(package).second || !load_op_package(package)) throw load_error(path, e);
    }
  }
  file.extra_files = {extra.begin(), extra.end()};
  return file;
}

void check_output(const std::string& path, bool force) {
  std::error_code error;
  auto status = fs::status(path, error);
  if (fs::is_directory(status)) throw Error(kBadInput, "Can't write '" + path + "': it is a directory.");
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw Error(kBadInput, "Can't write '" + path + "': it is not a regular file.");
  if (fs::exists(fs::symlink_status(path, error)) && !force) throw NewFile::exists(path);
  auto parent = fs::path(path).parent_path();
  if (parent.empty()) parent = ".";
  if (!fs::is_directory(parent, error))
    throw Error(kBadInput, "Can't write '" + path + "': there is no directory '" + parent.string() + "'.");
  if (access(parent.c_str(), W_OK) != 0)
    throw Error(kBadInput, "Can't write '" + path + "': " + std::strerror(errno) + ".");
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

struct PendingModel::File : NewFile {
  using NewFile::NewFile;
};

PendingModel::PendingModel(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                           const std::string& path, bool force)
    : force_(force) {
  check_output(path, force);
  file_ = std::make_unique<File>(path);
  torch::jit::ExtraFilesMap extra(extra_files.begin(), extra_files.end());
  auto write = [&](const void* data, size_t size) {
    file_->write(data, size);
    return size;
  };
  torch::jit::ExportModule(module, write, extra);
  file_->sync();
  if (fs::file_size(file_->name()) != file_->written())
    throw Error(kBadInput, "Can't write '" + path + "': the file system lost some of it.");
  auto archive = read_archive(file_->name());
  if (!archive.has("constants.pkl") || !archive.has("data.pkl"))
    throw Error(kBadInput, "Can't write '" + path + "': it reads back incomplete.");
}

PendingModel::~PendingModel() = default;

const std::string& PendingModel::temporary() const { return file_->name(); }

void PendingModel::commit() { file_->rename(force_); }

void save_model(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                const std::string& path, bool force) {
  PendingModel(module, extra_files, path, force).commit();
}

void save_text(const std::string& text, const std::string& path) {
  std::error_code error;
  auto status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status)) {  // a pipe, /dev/stdout
    int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    bool good = fd >= 0;
    for (size_t at = 0; good && at < text.size();) {
      ssize_t n = write(fd, text.data() + at, text.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        good = false;
      else
        at += static_cast<size_t>(n);
    }
    int failure = errno;
    if (fd >= 0) close(fd);
    if (!good) throw Error(kBadInput, "Can't write '" + path + "': " + std::strerror(failure) + ".");
    return;
  }
  check_output(path, true);
  NewFile file(path);
  file.write(text.data(), text.size());
  file.sync();
  file.rename(true);
}

void remove_temporary_file() {
  if (const char* name = temporary) unlink(name);
}

}  // namespace tsmem
