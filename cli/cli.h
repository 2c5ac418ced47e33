// Each subcommand is one file: it adds its options to the parser and returns what to run.
#pragma once
#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace tsmem::cli {

struct Common {  // options every subcommand has
  uint64_t seed = 0;
  bool verbose = false, quiet = false;
  std::string color = "auto";
  std::vector<std::string> op_libraries;
};

// Each returns the function that runs the command; its result is the exit code.
using Run = std::function<int()>;
Run add_rewrite(CLI::App& app, const Common& common);
Run add_diff(CLI::App& app, const Common& common);
Run add_profile(CLI::App& app, const Common& common);
Run add_verify(CLI::App& app, const Common& common);
Run add_plan(CLI::App& app, const Common& common);
Run add_inspect(CLI::App& app, const Common& common);
Run add_patterns(CLI::App& app, const Common& common);
Run add_completion(CLI::App& app, const Common& common);

bool use_color(const Common& common);           // --color, NO_COLOR, and whether stdout is a terminal
std::string bytes_text(int64_t bytes);          // "81.4 MiB"
}  // namespace tsmem::cli
