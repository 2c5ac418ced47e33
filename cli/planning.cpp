#include "cli/planning.h"

#include <fmt/format.h>

#include "rewriter/error.h"

namespace tsmem::cli {

void PlanLimits::add(CLI::App& app) {
  app.add_flag("--estimate", estimate, "Plan from shapes, FLOPs and bytes: run nothing");
  app.add_option("--solve-seconds", seconds, "Time limit of one solve (default 2, more for thousands of operators)")
      ->type_name("SECONDS")
      ->check(positive_number(1e6));
}

void PlanLimits::check(bool has_input, const std::string& amp) const {
  if (estimate && !amp.empty())
    throw Error(
        ErrorKind::request,
        "--estimate and --amp exclude each other: autocast does not act on shapes alone; leave --estimate out.");
  if (!has_input) throw Error(ErrorKind::request, "A plan needs an input: --input 8x3x224x224, for example.");
}

PlanOptions PlanLimits::options(const Common& common, const Progress& progress) const {
  PlanOptions options;
  options.seed = common.seed;
  options.solver.seconds = seconds;
  options.estimate = estimate;
  options.progress = [&progress](const std::string& text) { progress(text); };
  return options;
}

}  // namespace tsmem::cli
