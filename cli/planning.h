// What `plan` and `rewrite --budget` share.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli.h"
#include "rewriter/plan/planner.h"
#include "run_options.h"

namespace tsmem::cli {

struct PlanLimits {
  double seconds = 0;
  bool estimate = false;
  void add(CLI::App& app);
  // Throws Error(kUsage) without an input, and for --estimate under --amp.
  void check(bool has_input, const std::string& amp) const;
  PlanOptions options(const Common& common, const Progress& progress) const;
};

// A model that is ready to be planned, beside what the original needs.
struct Planned {
  RewriteReport report;
  std::unique_ptr<Planner> planner;

  // Loads the model at `path` to compare with, and rewrites `module`, which was loaded from there too, at Level::plan.
  // Throws what Planner does.
  Planned(const std::string& path, torch::jit::Module& module, RewriteOptions rewriting,
          const std::vector<c10::IValue>& inputs, const PlanOptions& options);
};

// "2GiB", "1500 MB", "123456" or, of `whole` bytes, "40%". Throws Error(kUsage) for anything else; `option` is named.
int64_t parse_size(const std::string& text, const std::string& option, int64_t whole);

nlohmann::json front_json(const Planned& planned, const std::vector<PlanPoint>& points);

// Step time over peak, both as ratios to the original and in their units.
std::string front_svg(const std::string& title, const Planned& planned, const std::vector<PlanPoint>& points);

}  // namespace tsmem::cli
