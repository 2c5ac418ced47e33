#include "cli/planning.h"

#include <fmt/format.h>

#include "rewriter/error.h"
#include "rewriter/plan/size.h"

namespace tsmem::cli {

void PlanLimits::add(CLI::App& app) {
  app.add_flag("--estimate", estimate, "Plan from shapes, FLOPs and bytes: run nothing");
  app.add_option("--solve-seconds", seconds, "Time limit of one solve (default 2, more for thousands of operators)")
      ->type_name("SECONDS")
      ->check(positive_number(1e6));
  app.add_flag("--offload", offload,
               "Let outputs wait for backward in the host's memory too, where copies take no longer than the step: for "
               "CUDA devices");
  app.add_option("--link", link,
                 "With --offload: bytes a second between device and host, such as 25GB (default: measured); on the CPU "
                 "such a link is simulated")
      ->type_name("SIZE");
}

void PlanLimits::check(bool has_input, const std::string& amp) const {
  if (estimate && !amp.empty())
    throw Error(
        ErrorKind::request,
        "--estimate and --amp exclude each other: autocast does not act on shapes alone; leave --estimate out.");
  if (!link.empty() && !offload) throw Error(ErrorKind::request, "--link is for --offload: give that too.");
  if (!link.empty()) parse_size(link, "--link", 0);
  if (!has_input) throw Error(ErrorKind::request, "A plan needs an input: --input 8x3x224x224, for example.");
}

PlanOptions PlanLimits::options(const Common& common, const Progress& progress) const {
  PlanOptions options;
  options.seed = common.seed;
  options.solver.seconds = seconds;
  options.estimate = estimate;
  options.offload = offload;
  if (!link.empty()) options.link = static_cast<double>(parse_size(link, "--link", 0));
  options.progress = [&progress](const std::string& text) { progress(text); };
  return options;
}

}  // namespace tsmem::cli
