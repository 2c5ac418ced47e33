#include "cli/png.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "rewriter/error.h"

extern char** environ;

namespace tsmem::cli {

static Error no_png(const std::string& why) { return Error(ErrorKind::input, "Can't draw a PNG: " + why); }

static const char* const kNoProgram =
    "the program rsvg-convert is not installed (Debian: librsvg2-bin); .svg and .html need nothing.";

void require_png() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/rsvg-convert").c_str(), X_OK) == 0) return;
  throw no_png(kNoProgram);
}

std::string png_of(const std::string& svg) {
  const auto fail = no_png;
  // Both through files without a name: a pipe each way would need two threads.
  const int in = memfd_create("svg", MFD_CLOEXEC), out = memfd_create("png", MFD_CLOEXEC);
  struct Closer {
    int a, b;
    ~Closer() {
      if (a >= 0) close(a);
      if (b >= 0) close(b);
    }
  } closer{in, out};
  if (in < 0 || out < 0) throw fail(fmt::format("{}.", std::strerror(errno)));
  for (size_t at = 0; at < svg.size();) {
    const ssize_t n = write(in, svg.data() + at, svg.size() - at);
    if (n < 0) throw fail(fmt::format("{}.", std::strerror(errno)));
    at += static_cast<size_t>(n);
  }
  lseek(in, 0, SEEK_SET);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in, 0);
  posix_spawn_file_actions_adddup2(&files, out, 1);
  const char* const arguments[] = {"rsvg-convert", "--zoom=2", "--format=png", nullptr};
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, arguments[0], &files, nullptr, const_cast<char**>(arguments), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error == ENOENT) throw fail(kNoProgram);
  if (error != 0) throw fail(fmt::format("rsvg-convert: {}.", std::strerror(error)));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw fail("rsvg-convert failed.");
  std::string png(static_cast<size_t>(lseek(out, 0, SEEK_END)), '\0');
  lseek(out, 0, SEEK_SET);
  for (size_t at = 0; at < png.size();) {
    const ssize_t n = read(out, png.data() + at, png.size() - at);
    if (n <= 0) throw fail("rsvg-convert's output can't be read.");
    at += static_cast<size_t>(n);
  }
  return png;
}

}  // namespace tsmem::cli
