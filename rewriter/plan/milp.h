// Mixed-integer linear programs, solved by HiGHS.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tsmem {

// Minimise cost * x, with bounds on every column and rows `sum of coefficients * columns <= limit`.
struct Milp {
  struct Column {
    double lower, upper, cost;
    bool integer;
  };
  struct Row {
    std::vector<std::pair<int, double>> entries;  // column, coefficient; a column once
    double limit;
  };
  std::vector<Column> columns;
  std::vector<Row> rows;

  int add(double lower, double upper, double cost, bool integer) {
    columns.push_back({lower, upper, cost, integer});
    return static_cast<int>(columns.size()) - 1;
  }
};

struct MilpSolution {
  bool found = false;          // a feasible one
  bool infeasible = false;     // proven: there is none
  std::vector<double> values;  // of the columns
  double gap = 0;              // at most this much above the best possible cost
};

// The best solution within `seconds`, or sooner one whose cost is at most `gap` above the best possible. `start`:
// values of the columns to begin with, of which the integer ones count; or empty.
MilpSolution solve(const Milp& problem, double seconds, double gap, const std::vector<double>& start = {});

// "HiGHS 1.15.1"
std::string solver_name();

}  // namespace tsmem
