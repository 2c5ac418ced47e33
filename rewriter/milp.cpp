#include "rewriter/milp.h"

#include <coin/Cbc_C_Interface.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

namespace tsmem {

MilpSolution solve(const Milp& problem, double seconds, double gap, const std::vector<double>& start) {
  const std::unique_ptr<Cbc_Model, void (*)(Cbc_Model*)> model(Cbc_newModel(), Cbc_deleteModel);
  Cbc_Model* m = model.get();
  Cbc_setLogLevel(m, 0);
  Cbc_setParameter(m, "log", "0");
  // At once: row by row the matrix is copied again and again.
  const size_t columns = problem.columns.size(), rows = problem.rows.size();
  std::vector<double> lower, upper, cost, no_limit(rows, -std::numeric_limits<double>::infinity()), limit;
  double dearest = 0;
  for (const auto& c : problem.columns) {
    lower.push_back(c.lower);
    upper.push_back(c.upper);
    cost.push_back(c.cost);
    dearest = std::max(dearest, std::abs(c.cost));
  }
  // Cbc's tolerances are absolute, 1e-7: costs of microseconds in seconds would be lost in them.
  const double unit = dearest > 0 ? 1e6 / dearest : 1;
  for (double& c : cost) c *= unit;
  std::vector<CoinBigIndex> starts(columns + 1);
  for (const auto& r : problem.rows) {
    limit.push_back(r.limit);
    for (const auto& [column, coefficient] : r.entries) ++starts[column + 1];
  }
  for (size_t i = 0; i < columns; ++i) starts[i + 1] += starts[i];
  std::vector<int> row_of(starts[columns]);
  std::vector<double> coefficients(starts[columns]);
  std::vector<CoinBigIndex> next(starts.begin(), starts.end() - 1);
  for (size_t r = 0; r < rows; ++r)
    for (const auto& [column, coefficient] : problem.rows[r].entries) {
      row_of[next[column]] = static_cast<int>(r);
      coefficients[next[column]++] = coefficient;
    }
  Cbc_loadProblem(m, static_cast<int>(columns), static_cast<int>(rows), starts.data(), row_of.data(),
                  coefficients.data(), lower.data(), upper.data(), cost.data(), no_limit.data(), limit.data());
  for (size_t i = 0; i < columns; ++i) {
    Cbc_setColName(m, static_cast<int>(i), fmt::format("x{}", i).c_str());  // starts are known by name
    if (problem.columns[i].integer) Cbc_setInteger(m, static_cast<int>(i));
  }
  Cbc_setObjSense(m, 1);
  Cbc_setMaximumSeconds(m, seconds);
  Cbc_setAllowableGap(m, gap * unit);
  if (!start.empty()) {
    std::vector<int> which;
    std::vector<double> values;
    for (size_t i = 0; i < problem.columns.size(); ++i)
      if (problem.columns[i].integer) {
        which.push_back(static_cast<int>(i));
        values.push_back(start[i]);
      }
    Cbc_setMIPStartI(m, static_cast<int>(which.size()), which.data(), values.data());
  }
  Cbc_solve(m);
  MilpSolution s;
  s.infeasible = Cbc_isProvenInfeasible(m);
  const double* x = Cbc_numberSavedSolutions(m) > 0 ? Cbc_bestSolution(m) : nullptr;
  if (!x && Cbc_isProvenOptimal(m)) x = Cbc_getColSolution(m);
  if (!x) return s;
  s.found = true;
  s.values.assign(x, x + problem.columns.size());
  s.gap = std::max(0.0, Cbc_getObjValue(m) - Cbc_getBestPossibleObjValue(m)) / unit;
  return s;
}

std::string solver_name() { return std::string("Cbc ") + Cbc_getVersion(); }

}  // namespace tsmem
