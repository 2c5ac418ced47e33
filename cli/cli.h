// Each subcommand is one file: it adds its options to the parser and returns what to run.
#pragma once
#include <CLI/CLI.hpp>

#include <chrono>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rewriter/clock.h"  // seconds_since()
#include "rewriter/error.h"
#include "rewriter/text.h"  // paint()
#include "tsmem/pattern.h"

namespace tsmem::cli {

enum Exit : int { kOk = 0, kDifferent = 1, kUsage = 2, kBadInput = 3, kBudget = 4, kBug = 70 };
Exit exit_code(ErrorKind kind);

struct Common {  // options every subcommand has
  uint64_t seed = 0;
  bool verbose = false, quiet = false;
  std::string color = "auto";
  std::vector<std::string> op_libraries;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
};

// Each adds its options to `app`, which is the subcommand itself (main.cpp has the table of them and makes it), sets an
// example with app.footer(), and returns the function that runs the command; that one's result is the exit code.
using Run = std::function<int()>;
Run add_rewrite(CLI::App& app, const Common& common);
Run add_diff(CLI::App& app, const Common& common);
Run add_profile(CLI::App& app, const Common& common);
Run add_verify(CLI::App& app, const Common& common);
Run add_plan(CLI::App& app, const Common& common);
Run add_import(CLI::App& app, const Common& common);
Run add_inspect(CLI::App& app, const Common& common);
Run add_patterns(CLI::App& app, const Common& common);
Run add_completion(CLI::App& app, const Common& common);

// --patterns FILE, repeatable.
void add_patterns_option(CLI::App& app, std::vector<std::string>& files);
// The patterns of all these files. Throws Error.
std::vector<Pattern> read_patterns(const std::vector<std::string>& files);

// Checks of an option's text, which take nothing else: CLI11's own let through what overflows, NaN, and take 010 for 8.
CLI::Validator whole_number(int64_t low, uint64_t high);
CLI::Validator positive_number(double high);

constexpr uint64_t kMostThreads = 1024;  // LibTorch starts them all, however few processors there are

bool use_color(const Common& common);   // --color, NO_COLOR, and whether stdout is a terminal
std::string bytes_text(int64_t bytes);  // "81.4 MiB"

// Writes to stdout. A reader that has gone away (`tsmem diff a b | head`) is no error: the command finishes its work.
void print(std::string_view text);

// Rows of cells as lines with aligned columns, two spaces between them; columns whose cells are all numbers are
// right-aligned.
std::string table(const std::vector<std::vector<std::string>>& rows);

// Throws before the work what save_text() would throw after it. Nothing for "" (no such file is asked for), "-" and
// devices.
void check_report(const std::string& path);

// --json FILE: to a file, or to stdout for "-". `inputs` are files that must not be replaced by it.
void write_json(const nlohmann::json& json, const std::string& path, const std::vector<std::string>& inputs);

// " (did you mean 'x'?)", or "" where no candidate is near or begins with `word`.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& candidates);

// "a, b and c".
std::string enumerate(const std::vector<std::string>& items);

// "1 method", "2 methods".
std::string counted(size_t n, const std::string& noun);

// A shell's completion script for the whole command line, from the parser itself. Throws Error(ErrorKind::request) for
// an unknown shell.
std::string completion_script(const CLI::App& root, const std::string& shell);

}  // namespace tsmem::cli
