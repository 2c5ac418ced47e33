// What several subcommands share: printing, tables, sizes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/cli.h"
#include "rewriter/error.h"
#include "rewriter/file/new_file.h"
#include "rewriter/text.h"

namespace tsmem::cli {

namespace {

template <class T>
std::optional<T> parse(std::string_view text) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

}  // namespace

Exit exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::request:
      return kUsage;
    case ErrorKind::input:
      return kBadInput;
    case ErrorKind::budget:
      return kBudget;
  }
  return kBug;
}

void add_patterns_option(CLI::App& app, std::vector<std::string>& files) {
  app.add_option("--patterns", files, "Patterns of your own, for operators that --ops loads; repeatable")
      ->type_name("FILE")
      ->allow_extra_args(false);
}

std::vector<Pattern> read_patterns(const std::vector<std::string>& files) {
  std::vector<Pattern> all;
  for (auto& file : files)
    for (auto& pattern : tsmem::read_patterns(file)) all.push_back(std::move(pattern));
  check_patterns(all);
  return all;
}

CLI::Validator whole_number(int64_t low, uint64_t high) {
  return CLI::Validator(
      [=](std::string& text) {
        const auto positive = parse<uint64_t>(text);
        const auto negative = parse<int64_t>(text);
        const bool good = positive ? *positive <= high && (low < 0 || *positive >= static_cast<uint64_t>(low))
                                   : negative && *negative >= low;
        if (!good) return fmt::format("'{}' is not a whole number from {} to {}", text, low, high);
        text = positive ? std::to_string(*positive) : std::to_string(*negative);
        return std::string();
      },
      "");
}

CLI::Validator positive_number(double high) {
  return CLI::Validator(
      [=](std::string& text) {
        const auto value = parse<double>(text);
        const bool good = value && *value > 0 && *value <= high;
        return good ? std::string() : fmt::format("'{}' is not a number above 0 and up to {}", text, high);
      },
      "");
}

bool use_color(const Common& common) {
  if (common.color != "auto") return common.color == "always";
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  return !(no_color && *no_color) && !(terminal && !std::strcmp(terminal, "dumb")) && isatty(STDOUT_FILENO);
}

std::string bytes_text(int64_t bytes) {
  static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double size = static_cast<double>(bytes);
  int unit = 0;
  // 1023.96 would be printed as 1024.0.
  while (std::abs(size) >= (unit ? 1023.95 : 1024.0) && unit < 6) {
    size /= 1024;
    ++unit;
  }
  return unit ? fmt::format("{:.1f} {}", size, units[unit]) : fmt::format("{} B", bytes);
}

void print(std::string_view text) {
  static bool gone = false;
  if (gone) return;
  errno = 0;
  bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (written) return;
  if (errno != EPIPE)
    throw Error(ErrorKind::input, std::string("Can't write to standard output: ") + std::strerror(errno) + ".");
  gone = true;
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  std::vector<bool> numbers;
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t c = 0; c < rows[r].size(); ++c) {
      if (c >= widths.size()) {
        widths.push_back(0);
        numbers.push_back(true);
      }
      widths[c] = std::max(widths[c], rows[r][c].size());
      // The first row is the heading.
      if (r > 0 && rows[r][c].find_first_not_of("0123456789.,-+%") != std::string::npos) numbers[c] = false;
    }
  std::string text;
  for (auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      if (c) line += "  ";
      line += numbers[c] ? fmt::format("{:>{}}", row[c], widths[c]) : fmt::format("{:<{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void check_report(const std::string& path) {
  if (!path.empty() && path != "-" && !path.starts_with("/dev/")) check_output(path, /*force=*/true);
}

void write_json(const nlohmann::json& json, const std::string& path, const std::vector<std::string>& inputs) {
  // Names in a model need not be UTF-8.
  auto text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (path == "-") return print(text);
  for (auto& input : inputs)
    if (same_file(path, input))
      throw Error(ErrorKind::request, "--json '" + path + "' would replace a model that this command reads or writes.");
  save_text(text, path);
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  for (auto& candidate : candidates)
    if (best.empty() && word.size() >= 3 && candidate.starts_with(word)) best = candidate;
  if (best.empty()) best = nearest(word, candidates);
  return best.empty() ? "" : " (did you mean '" + best + "'?)";
}

std::string enumerate(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) text += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
  return text;
}

std::string counted(size_t n, const std::string& noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

}  // namespace tsmem::cli
