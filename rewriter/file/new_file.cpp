#include "rewriter/file/new_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

namespace tsmem {
namespace fs = std::filesystem;
namespace {

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

Error exists_already(const std::string& path) {
  return Error(ErrorKind::request, "'" + path + "' exists already.", "force");
}

}  // namespace

NewFile::NewFile(const std::string& path) : target_(followed(path)) {
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

NewFile::~NewFile() {
  if (fd_ >= 0) close(fd_);
  if (!done_) unlink(name_.c_str());
  temporary = nullptr;
}

void NewFile::write(const void* data, size_t size) {
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

void NewFile::sync() {
  if (error_ == 0 && fsync(fd_) != 0 && errno != EINVAL) error_ = errno;
  if (close(fd_) != 0 && error_ == 0) error_ = errno;
  fd_ = -1;
  if (error_ != 0) throw failed(error_);
}

void NewFile::rename(bool replace) {
  if (!replace) {
    // Another program may have made the file since it was looked for.
    if (renameat2(AT_FDCWD, name_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) == 0) return finish();
    if (errno == EEXIST) throw exists_already(target_.string());
    if (errno != EINVAL && errno != ENOSYS) throw failed(errno);
  }
  if (::rename(name_.c_str(), target_.c_str()) != 0) throw failed(errno);
  finish();
}

void NewFile::finish() {
  done_ = true;
  // The rename itself is on disk once the directory is; not every file system can sync one.
  auto parent = target_.parent_path();
  int directory = open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    fsync(directory);
    close(directory);
  }
}

Error NewFile::failed(int error) const {
  return Error(ErrorKind::input, "Can't write '" + target_.string() + "': " + std::strerror(error) + ".");
}

void check_output(const std::string& named, bool force) {
  std::error_code error;
  const auto path = followed(named).string();
  auto status = fs::status(path, error);
  if (fs::is_directory(status)) throw Error(ErrorKind::input, "Can't write '" + path + "': it is a directory.");
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw Error(ErrorKind::input, "Can't write '" + path + "': it is not a regular file.");
  if (fs::exists(fs::symlink_status(named, error)) && !force) throw exists_already(named);
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
