#include "rewriter/milp.h"

#include <coin/Cbc_C_Interface.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace tsmem {

MilpSolution solve(const Milp& problem, double seconds, double gap, const std::vector<double>& start) {
  const std::unique_ptr<Cbc_Model, void (*)(Cbc_Model*)> model(Cbc_newModel(), Cbc_deleteModel);
  Cbc_Model* m = model.get();
  Cbc_setLogLevel(m, 0);
  Cbc_setParameter(m, "log", "0");
  for (size_t i = 0; i < problem.columns.size(); ++i) {
    const auto& c = problem.columns[i];
    Cbc_addCol(m, fmt::format("x{}", i).c_str(), c.lower, c.upper, c.cost, c.integer, 0, nullptr, nullptr);
  }
  std::vector<int> columns;
  std::vector<double> coefficients;
  for (size_t i = 0; i < problem.rows.size(); ++i) {
    const auto& r = problem.rows[i];
    columns.clear();
    coefficients.clear();
    for (const auto& [column, coefficient] : r.entries) {
      columns.push_back(column);
      coefficients.push_back(coefficient);
    }
    Cbc_addRow(m, fmt::format("r{}", i).c_str(), static_cast<int>(columns.size()), columns.data(), coefficients.data(),
               'L', r.limit);
  }
  Cbc_setObjSense(m, 1);
  Cbc_setMaximumSeconds(m, seconds);
  Cbc_setAllowableGap(m, gap);
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
  s.gap = std::max(0.0, Cbc_getObjValue(m) - Cbc_getBestPossibleObjValue(m));
  return s;
}

std::string solver_name() { return std::string("Cbc ") + Cbc_getVersion(); }

}  // namespace tsmem
