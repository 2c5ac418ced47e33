// A file in memory alone, for what reads files by their names.
#pragma once
#include <string>
#include <string_view>

namespace tsmem {

class MemoryFile {
 public:
  // Throws Error(ErrorKind::input) where the system gives no such file.
  explicit MemoryFile(std::string_view bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  // Good for this process as long as the object lives.
  std::string path() const;

 private:
  int fd_;
};

}  // namespace tsmem
