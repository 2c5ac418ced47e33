// What `plan` and `rewrite --budget` share.
#pragma once
#include <string>

#include "cli/cli.h"
#include "cli/run_options.h"
#include "tsmem/plan.h"

namespace tsmem::cli {

struct PlanLimits {
  double seconds = 0;
  bool estimate = false, offload = false;
  std::string link;
  void add(CLI::App& app);
  // Throws Error(ErrorKind::request) without an input, for --estimate under --amp, and for --link without --offload.
  void check(bool has_input, const std::string& amp) const;
  PlanOptions options(const Common& common, const Progress& progress) const;
};

}  // namespace tsmem::cli
