#include "rewriter/session/report_json.h"

#include <torch/version.h>

#include <nlohmann/json.hpp>

namespace tsmem {

using nlohmann::json;

namespace {

json matches_json(const RewriteReport& report) {
  json matches = json::array();
  for (const Match& m : report.matches)
    matches.push_back(
        {{"pattern", m.pattern}, {"module", m.module}, {"method", m.method}, {"nodes", m.nodes}, {"op", m.op}});
  return matches;
}

const char* name_of(Level level) {
  switch (level) {
    case Level::ops:
      return "ops";
    case Level::regions:
      return "regions";
    case Level::plan:
      return "plan";
  }
  return "";
}

json point_json(const PlanPoint& p) {
  return {{"budget", p.budget},
          {"predicted_peak_bytes", p.predicted_peak_bytes},
          {"predicted_seconds", p.predicted_seconds},
          {"kept_bytes", p.kept_bytes},
          {"recomputed_flops", p.recomputed_flops},
          {"offloaded_bytes", p.offloaded_bytes},
          {"gap", p.gap}};
}

}  // namespace

json to_json(const RewriteReport& report) {
  json refused = json::array(), regions = json::array();
  for (const Refusal& r : report.refused)
    refused.push_back({{"pattern", r.pattern}, {"module", r.module}, {"reason", r.reason}});
  for (const Region& r : report.regions)
    regions.push_back({{"module", r.module}, {"method", r.method}, {"kept", r.kept}, {"recomputed", r.recomputed}});
  json all = {{"matches", matches_json(report)}, {"refused", refused}, {"regions", regions}};
  all.update(to_json(report.saved));
  return all;
}

json to_json(const Saved& saved) {
  json stays = json::array();
  const auto number = [](const std::optional<int64_t>& n) { return n ? json(*n) : json(); };
  for (const Stay& s : saved.stays)
    stays.push_back(
        {{"op", s.op}, {"module", s.module}, {"bytes", number(s.bytes)}, {"tensors", s.tensors}, {"reason", s.reason}});
  return {{"stays", stays},
          {"saved",
           {{"bytes", {number(saved.original_bytes), number(saved.bytes)}},
            {"tensors", {saved.original_tensors, saved.tensors}}}}};
}

json to_json(const ChosenPlan& plan) {
  const auto ops_json = [](const std::vector<ChosenPlan::Op>& ops) {
    json all = json::array();
    for (const auto& op : ops) all.push_back({{"module", op.module}, {"op", op.op}});
    return all;
  };
  const PlanPoint& p = plan.point;
  json all = {{"budget", p.budget},
              {"peak_bytes", p.predicted_peak_bytes},
              {"seconds", p.predicted_seconds},
              {"kept_bytes", p.kept_bytes},
              {"recomputed_flops", p.recomputed_flops},
              {"run_again", ops_json(plan.run_again)},
              {"offloaded", ops_json(plan.offloaded)},
              {"offloaded_bytes", p.offloaded_bytes},
              {"original_peak_bytes", plan.original.peak_bytes},
              {"original_seconds", plan.original.seconds},
              {"solver", plan.solver},
              {"solve_seconds", plan.solve_seconds},
              {"gap", p.gap}};
  if (!plan.batches) return all;
  const auto& batches = *plan.batches;
  all["weights_bytes"] = batches.weight_bytes;
  all["gradient_and_optimizer_bytes"] = batches.gradient_and_optimizer_bytes;
  all["batch_sizes"] = json::array();
  for (const BatchMemory& b : batches.asked)
    all["batch_sizes"].push_back(
        {{"batch", b.batch}, {"peak_bytes", b.peak_bytes}, {"total_bytes", b.total_bytes}, {"measured", b.measured}});
  if (const auto& largest = batches.largest)
    all["fit"] = {{"bytes", batches.fit_bytes},
                  {"batch", largest->batch},
                  {"total_bytes", largest->total_bytes},
                  {"measured", largest->measured}};
  return all;
}

json to_json(const PlanFront& front) {
  json points = json::array();
  for (const PlanPoint& p : front.points) points.push_back(point_json(p));
  return {{"points", points},
          {"smallest_budget", front.points.front().predicted_peak_bytes},
          {"solver", front.solver},
          {"solve_seconds", front.solve_seconds},
          {"original",
           {{"peak_bytes", front.original.peak_bytes},
            {"saved_bytes", front.original.saved_bytes},
            {"step_seconds", front.original.seconds}}}};
}

json about_json(const RewriteOptions& o, const RewriteReport& report, const ChosenPlan* plan) {
  std::vector<std::string> own;
  for (const Pattern& p : o.patterns) own.push_back(p.name);
  json about = {{"tool", "tsmem"},
                {"version", TSMEM_VERSION},
                {"torch", TORCH_VERSION},
                {"options",
                 {{"level", name_of(o.level)},
                  {"patterns", own},
                  {"only", o.only},
                  {"skip", o.skip},
                  {"module", o.module_globs},
                  {"checkpoint", o.checkpoint},
                  {"freeze", o.freeze},
                  {"train", o.train},
                  {"amp", o.amp},
                  {"method", o.method}}},
                {"matches", matches_json(report)}};
  if (plan) about["plan"] = to_json(*plan);
  return about;
}

}  // namespace tsmem
