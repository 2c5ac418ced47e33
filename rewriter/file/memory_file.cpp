#include "rewriter/file/memory_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "rewriter/error.h"

namespace tsmem {

MemoryFile::MemoryFile(std::string_view bytes) : fd_(memfd_create("tsmem", MFD_CLOEXEC)) {
  bool good = fd_ >= 0;
  while (good && !bytes.empty()) {
    const ssize_t n = write(fd_, bytes.data(), std::min<size_t>(bytes.size(), 1 << 30));
    if (n < 0 && errno == EINTR) continue;
    good = n > 0;
    if (good) bytes.remove_prefix(static_cast<size_t>(n));
  }
  if (good) return;
  const int error = errno;
  if (fd_ >= 0) close(fd_);
  throw Error(ErrorKind::input, std::string("Can't hold the model in a file in memory: ") + std::strerror(error) + ".");
}

MemoryFile::~MemoryFile() { close(fd_); }

std::string MemoryFile::path() const { return "/proc/self/fd/" + std::to_string(fd_); }

}  // namespace tsmem
