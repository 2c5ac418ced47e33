// What the commands that run a model share: profile and verify.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "tsmem/verify.h"

namespace tsmem::cli {

// A line on a terminal's stderr that says what runs now; gone when the work is done. Nothing elsewhere, or with
// --quiet.
class Progress {
 public:
  explicit Progress(const Common& common) : on_(!common.quiet && isatty(STDERR_FILENO)) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void operator()(const std::string& text) const {
    if (on_) std::fprintf(stderr, "\r\033[K%s", text.substr(0, 78).c_str());
  }
  // With a bar of which `done`, from 0 to 1, is filled.
  void operator()(const std::string& text, double done) const {
    constexpr int kWidth = 20;
    const int filled = static_cast<int>(done * kWidth);
    (*this)("[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "] " + text);
  }
  void clear() const {
    if (on_) std::fputs("\r\033[K", stderr);
  }

 private:
  bool on_;
};

struct RunOptions {
  std::vector<std::string> inputs;
  std::string inputs_file, method = "forward", device = "cpu", json;
  int threads = 0;

  void add(CLI::App& app) {
    app.add_option("--input", inputs,
                   "An argument of the method, such as 8x3x224x224, 4x128:i64[0,30522), 3:int or @file.pt; repeatable")
        ->type_name("SPEC")
        ->allow_extra_args(false);
    app.add_option("--inputs", inputs_file, "All arguments at once: a tuple saved by torch.save")
        ->type_name("@FILE.pt");
    app.add_option("--method", method, "The method to call (default forward)")->type_name("NAME");
    app.add_option("--device", device, "Where to run: cpu (default), cuda or cuda:N")->type_name("DEVICE");
    app.add_option("--threads", threads, "CPU threads (default: PyTorch's choice)")
        ->type_name("N")
        ->check(whole_number(1, kMostThreads));
    app.add_option("--json", json, "Write a report; '-' for standard output")->type_name("FILE");
  }

  // Sets the threads. Throws Error(ErrorKind::request) for options that exclude each other.
  void apply() const;
};

// Cells of a column padded on the left, so that numbers with units line up; the first row is the heading.
void align_right(std::vector<std::vector<std::string>>& rows, size_t column);

std::string seconds_text(double seconds);  // "12.3 ms"
// What was compared, and the option that compares more; "" where nothing was.
std::string compared_line(const VerifyResult& r);

std::string ratio_text(double b, double a);  // "0.53", or "-" where there is nothing to divide by

}  // namespace tsmem::cli
