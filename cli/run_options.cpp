#include "cli/run_options.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "rewriter/error.h"

namespace tsmem::cli {

void RunOptions::apply() const {
  if (!inputs.empty() && !inputs_file.empty())
    throw Error(ErrorKind::request, "--input and --inputs exclude each other; --inputs holds all arguments.");
  if (threads > 0) at::set_num_threads(threads);
}

void align_right(std::vector<std::vector<std::string>>& rows, size_t column) {
  size_t width = 0;
  for (auto& row : rows)
    if (column < row.size()) width = std::max(width, row[column].size());
  for (auto& row : rows)
    if (column < row.size()) row[column].insert(0, width - row[column].size(), ' ');
}

std::string seconds_text(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.0f} us", seconds * 1e6);
}

std::string compared_line(const VerifyResult& r) {
  std::string text = compared_text(r);
  if (!text.empty() && !r.thorough) text += " --thorough asks for that.";
  return text;
}

std::string ratio_text(double b, double a) { return a > 0 ? fmt::format("{:.2f}", b / a) : "-"; }

}  // namespace tsmem::cli
