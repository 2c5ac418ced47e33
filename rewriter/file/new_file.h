// Writing a file whole or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "rewriter/error.h"

namespace tsmem {

// A temporary file beside its target, removed unless it is renamed to it. Everything but write() throws
// Error(ErrorKind::input) for what the system refuses.
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();

  // Never fails by itself: PyTorch's writer ends the process when its callback fails. sync() throws the first error.
  void write(const void* data, size_t size);
  void sync();
  // Throws Error(ErrorKind::request) where the target exists, unless `replace`.
  void rename(bool replace);

  const std::string& name() const { return name_; }
  uint64_t written() const { return written_; }

 private:
  void finish();
  Error failed(int error) const;

  std::filesystem::path target_;
  std::string name_;
  int fd_ = -1, error_ = 0;
  uint64_t written_ = 0;
  bool done_ = false;
};

// For those who want to know before a long computation: that `path` can be made, and that nothing is there unless
// `force`. Throws Error(ErrorKind::input), Error(ErrorKind::request) for a file that exists.
void check_output(const std::string& path, bool force);

// True where both names lead to the same existing file, through links too.
bool same_file(const std::string& a, const std::string& b);

// Writes text (JSON, SVG, HTML). An existing file is replaced, and a device or pipe (/dev/stdout) is written to.
void save_text(const std::string& text, const std::string& path);

// Removes the file that is being written at this moment. For signal handlers.
void remove_temporary_file();

}  // namespace tsmem
