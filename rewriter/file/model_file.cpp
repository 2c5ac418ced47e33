#include "rewriter/file/model_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "rewriter/error.h"
#include "rewriter/file/archive.h"
#include "rewriter/file/check_file.h"
#include "rewriter/file/op_library.h"
#include "rewriter/graph/exported_program.h"

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

// Where a temporary file is being written, for remove_temporary_file.
std::atomic<const char*> temporary{nullptr};

// Through symbolic links their target is written, as every other program does, also where nothing is there yet.
fs::path followed(fs::path path) {
  std::error_code error;
  for (int links = 0; links < 40 && fs::is_symlink(fs::symlink_status(path, error)); ++links)
    path = path.parent_path() / fs::read_symlink(path, error);
  return path;
}

constexpr size_t kLongestName = 255;  // of a file, in bytes: NAME_MAX of Linux's file systems

// What temporary files for `target` begin with. Names that leave no room for more are cut, and told apart by a hash.
std::string temporary_stem(const fs::path& target) {
  const std::string mark = ".tmp-tsmem-", name = target.filename().string();
  const size_t room = kLongestName - mark.size() - 16;
  if (name.size() <= room) return name + mark;
  size_t cut = room - 17;
  while (cut > 0 && (static_cast<unsigned char>(name[cut]) & 0xc0) == 0x80) --cut;  // not inside a character
  return name.substr(0, cut) + fmt::format("~{:016x}", std::hash<std::string>()(name)) + mark;
}

// Removes the temporary files of tools that ended before they could (SIGKILL, no power): a live one holds a lock on its
// own.
void clear_left_over(const fs::path& directory, const std::string& stem) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (!name.starts_with(stem) || name.size() != stem.size() + 16 ||
        name.find_first_not_of("0123456789abcdef", stem.size()) != name.npos)
      continue;
    const int fd = open(entry->path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlink(entry->path().c_str());
    close(fd);
  }
}

// A file beside its target, removed unless it is renamed to it.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : target_(followed(path)) {
    const auto directory = target_.has_parent_path() ? target_.parent_path() : fs::path(".");
    const auto stem = temporary_stem(target_);
    clear_left_over(directory, stem);
    struct stat old;
    const bool replaces = stat(target_.c_str(), &old) == 0;
    std::random_device random;
    for (int tries = 0; fd_ < 0 && tries < 100; ++tries) {
      name_ = (directory / fmt::format("{}{:08x}{:08x}", stem, random(), random())).string();
      // What replaces a private file is never open to others.
      fd_ = open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, replaces ? 0600 : 0666);
      if (fd_ < 0 && errno != EEXIST) break;
      // Between the two calls another tool may have taken it for left over. No lock is no loss: then none is cleared.
      struct stat mine;
      if (fd_ >= 0 && flock(fd_, LOCK_EX) == 0 && fstat(fd_, &mine) == 0 && mine.st_nlink == 0) {
        close(fd_);
        fd_ = -1;
      }
    }
    if (fd_ < 0) throw failed(errno);
    temporary = name_.c_str();
    if (replaces) {
      // Who may read and write stays as it was, as far as we may say so; another group gets what all others have.
      mode_t mode = old.st_mode & 0777;
      if (fchown(fd_, static_cast<uid_t>(-1), old.st_gid) != 0) mode = (mode & ~070u) | (mode & 07u) << 3;
      [[maybe_unused]] const int not_owner = fchown(fd_, old.st_uid, static_cast<gid_t>(-1));
      if (fchmod(fd_, mode) != 0) error_ = errno;
    }
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
    return Error(ErrorKind::request, "'" + path + "' exists already.", "force");
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
    return Error(ErrorKind::input, "Can't write '" + target_.string() + "': " + std::strerror(error) + ".");
  }

  fs::path target_;
  std::string name_;
  int fd_ = -1, error_ = 0;
  uint64_t written_ = 0;
  bool done_ = false;
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
    const auto program = std::make_shared<const ExportedProgram>(read_exported(path, archive));
    ModelFile file{path, module_of(*program, device), extra_files_of(*program), program};
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

void check_output(const std::string& named, bool force) {
  std::error_code error;
  const auto path = followed(named).string();
  auto status = fs::status(path, error);
  if (fs::is_directory(status)) throw Error(ErrorKind::input, "Can't write '" + path + "': it is a directory.");
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw Error(ErrorKind::input, "Can't write '" + path + "': it is not a regular file.");
  if (fs::exists(fs::symlink_status(named, error)) && !force) throw NewFile::exists(named);
  if (fs::is_symlink(fs::symlink_status(path, error)))
    throw Error(ErrorKind::input, "Can't write '" + named + "': its links lead nowhere.");
  if (fs::path(path).filename().string().size() > kLongestName)
    throw Error(ErrorKind::input, "Can't write '" + path + "': " + std::strerror(ENAMETOOLONG) + ".");
  auto parent = fs::path(path).parent_path();
  if (parent.empty()) parent = ".";
  if (!fs::is_directory(parent, error))
    throw Error(ErrorKind::input, "Can't write '" + path + "': there is no directory '" + parent.string() + "'.");
  if (access(parent.c_str(), W_OK) != 0)
    throw Error(ErrorKind::input, "Can't write '" + path + "': " + std::strerror(errno) + ".");
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

struct PendingModel::File : NewFile {
  using NewFile::NewFile;
};

PendingModel::PendingModel(const ModelFile& model, const std::string& path, bool force) : force_(force) {
  check_output(path, force);
  file_ = std::make_unique<File>(path);
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
    if (!good) throw Error(ErrorKind::input, "Can't write '" + path + "': " + std::strerror(failure) + ".");
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
