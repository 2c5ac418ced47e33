#include "rewriter/plan/milp.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

// What is used of HiGHS's C interface (highs/interfaces/highs_c_api.h of version 1): highspy has no header.
extern "C" {
void* Highs_create(void);
void Highs_destroy(void* highs);
const char* Highs_version(void);
int Highs_passMip(void* highs, int columns, int rows, int entries, int format, int sense, double offset,
                  const double* cost, const double* lower, const double* upper, const double* row_lower,
                  const double* row_upper, const int* starts, const int* indices, const double* values,
                  const int* integrality);
int Highs_setBoolOptionValue(void* highs, const char* option, int value);
int Highs_setIntOptionValue(void* highs, const char* option, int value);
int Highs_setDoubleOptionValue(void* highs, const char* option, double value);
int Highs_setSparseSolution(void* highs, int entries, const int* indices, const double* values);
int Highs_run(void* highs);
int Highs_getModelStatus(const void* highs);
int Highs_getIntInfoValue(const void* highs, const char* info, int* value);
int Highs_getDoubleInfoValue(const void* highs, const char* info, double* value);
int Highs_getSolution(const void* highs, double* columns, double* column_duals, double* rows, double* row_duals);
}

namespace tsmem {
namespace {
constexpr int kMinimise = 1, kRowwise = 2, kOptimal = 7, kInfeasible = 8, kUnboundedOrInfeasible = 9,
              kFeasibleSolution = 2;
}

// HiGHS has no answer to a problem without columns.
static MilpSolution without_columns(const Milp& problem) {
  MilpSolution s;
  s.found = std::all_of(problem.rows.begin(), problem.rows.end(), [](const Milp::Row& r) { return r.limit >= 0; });
  s.infeasible = !s.found;
  return s;
}

MilpSolution solve(const Milp& problem, double seconds, double gap, const std::vector<double>& start) {
  if (problem.columns.empty()) return without_columns(problem);
  const std::unique_ptr<void, void (*)(void*)> model(Highs_create(), Highs_destroy);
  void* m = model.get();
  const size_t columns = problem.columns.size(), rows = problem.rows.size();
  std::vector<double> lower, upper, cost, no_limit(rows, -std::numeric_limits<double>::infinity()), limit;
  std::vector<int> integer;
  double highest = 0, least = 0;  // least: no choice costs less, whatever the rows say
  for (const auto& c : problem.columns) {
    lower.push_back(c.lower);
    upper.push_back(c.upper);
    cost.push_back(c.cost);
    integer.push_back(c.integer);
    highest = std::max(highest, std::abs(c.cost));
  }
  // The solver's tolerances are absolute, 1e-7: costs of microseconds in seconds would be lost in them.
  const double unit = highest > 0 ? 1e6 / highest : 1;
  for (size_t i = 0; i < columns; ++i) {
    cost[i] *= unit;
    least += std::min(cost[i] * lower[i], cost[i] * upper[i]);
  }
  std::vector<int> starts, column_of;
  std::vector<double> coefficients;
  for (const auto& r : problem.rows) {
    limit.push_back(r.limit);
    starts.push_back(static_cast<int>(column_of.size()));
    for (const auto& [column, coefficient] : r.entries) {
      column_of.push_back(column);
      coefficients.push_back(coefficient);
    }
  }
  Highs_setBoolOptionValue(m, "output_flag", 0);
  Highs_setIntOptionValue(m, "threads", 1);
  Highs_setDoubleOptionValue(m, "time_limit", seconds);
  Highs_setDoubleOptionValue(m, "mip_rel_gap", 0);
  Highs_setDoubleOptionValue(m, "mip_abs_gap", gap * unit);
  // Rounding finds good choices here, and what remains to be proven may take minutes.
  Highs_setDoubleOptionValue(m, "mip_heuristic_effort", 0.2);
  Highs_passMip(m, static_cast<int>(columns), static_cast<int>(rows), static_cast<int>(column_of.size()), kRowwise,
                kMinimise, 0, cost.data(), lower.data(), upper.data(), no_limit.data(), limit.data(), starts.data(),
                column_of.data(), coefficients.data(), integer.data());
  if (!start.empty()) {
    std::vector<int> which;
    std::vector<double> values;
    for (size_t i = 0; i < columns; ++i)
      if (problem.columns[i].integer) {
        which.push_back(static_cast<int>(i));
        values.push_back(start[i]);
      }
    Highs_setSparseSolution(m, static_cast<int>(which.size()), which.data(), values.data());
  }
  Highs_run(m);
  MilpSolution s;
  const int status = Highs_getModelStatus(m);
  s.infeasible = status == kInfeasible || status == kUnboundedOrInfeasible;
  int primal = 0;
  Highs_getIntInfoValue(m, "primal_solution_status", &primal);
  if (s.infeasible || primal != kFeasibleSolution) return s;
  s.found = true;
  s.values.resize(columns);
  Highs_getSolution(m, s.values.data(), nullptr, nullptr, nullptr);
  double found = 0, bound = 0;
  Highs_getDoubleInfoValue(m, "objective_function_value", &found);
  Highs_getDoubleInfoValue(m, "mip_dual_bound", &bound);
  if (status == kOptimal && std::count(integer.begin(), integer.end(), 1) == 0) bound = found;
  s.gap = std::max(0.0, found - std::max(bound, least)) / unit;
  return s;
}

std::string solver_name() { return std::string("HiGHS ") + Highs_version(); }

}  // namespace tsmem
