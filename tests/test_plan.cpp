// The solver's wrapper, and sites that plans choose from.
#include <gtest/gtest.h>

#include "ops/recompute_argument.h"
#include "rewriter/plan/milp.h"
#include "rewriter/plan/planner.h"
#include "rewriter/rewrite/rewrite.h"

namespace tsmem {
namespace {

// Whatever the costs are measured in.
TEST(Milp, TakesTheBestOfAKnapsack) {
  for (const double unit : {1.0, 1e-9, 1e9}) {
    Milp p;
    const double value[] = {10, 13, 7, 8}, weight[] = {3, 4, 2, 3};
    Milp::Row row{{}, 7};
    for (int i = 0; i < 4; ++i) row.entries.emplace_back(p.add(0, 1, -value[i] * unit, true), weight[i]);
    p.rows.push_back(row);
    const MilpSolution s = solve(p, 10, 0);
    ASSERT_TRUE(s.found);
    EXPECT_NEAR(s.values[0] + s.values[1], 2, 1e-6);
    EXPECT_NEAR(s.values[2] + s.values[3], 0, 1e-6);
    EXPECT_NEAR(s.gap, 0, 1e-6 * unit);
  }
}

TEST(Milp, SaysWhereThereIsNoSolution) {
  Milp p;
  const int x = p.add(0, 1, 1, true);
  p.rows.push_back({{{x, -1}}, -2});  // x >= 2
  EXPECT_FALSE(solve(p, 10, 0).found);
}

TEST(Milp, HasAnAnswerWithoutColumns) {
  Milp p;
  p.rows.push_back({{}, 1});
  EXPECT_TRUE(solve(p, 10, 0).found);
  p.rows.push_back({{}, -1});
  EXPECT_FALSE(solve(p, 10, 0).found);
  EXPECT_TRUE(solve(p, 10, 0).infeasible);
}

TEST(Milp, StartsFromWhatItIsGiven) {
  Milp p;
  std::vector<double> start;
  Milp::Row row{{}, -3};  // at least three
  for (int i = 0; i < 6; ++i) {
    row.entries.emplace_back(p.add(0, 1, 1 + i, true), -1);
    start.push_back(1);
  }
  p.rows.push_back(row);
  const MilpSolution s = solve(p, 10, 0, start);
  ASSERT_TRUE(s.found);
  EXPECT_NEAR(s.values[0] + s.values[1] + s.values[2], 3, 1e-6);
}

torch::jit::Module two_of_a_kind() {
  torch::jit::Module block("Block"), model("Model");
  block.define("def forward(self, x, w):\n  return torch.relu(torch.conv2d(x, w))\n");
  model.register_module("a", block);
  model.register_module("b", torch::jit::Module(block._ivalue()->compilation_unit(), block.type()));
  model.define("def forward(self, x, w):\n  return self.b.forward(self.a.forward(x, w), w)\n");
  return model;
}

TEST(Plan, EveryInstanceHasItsOwnChoice) {
  torch::jit::Module m = two_of_a_kind();
  RewriteOptions options;
  options.level = Level::plan;
  const RewriteReport report = rewrite(m, options);
  std::set<std::string> expensive, cheap;
  for (const Site& s : report.sites) (s.expensive ? expensive : cheap).insert(s.module);
  EXPECT_EQ(expensive, (std::set<std::string>{"a", "b"}));
  EXPECT_EQ(cheap, (std::set<std::string>{"a", "b"}));
  // As at Level::regions until somebody chooses.
  for (const Site& s : report.sites)
    EXPECT_EQ(m.attr(s.module).toModule().attr(s.attribute).toInt(),
              argument_of(s.expensive ? Recompute::keep : Recompute::each_time))
        << s.module << " " << s.op;
  Choice choice;
  for (const Site& s : report.sites) choice.push_back(s.module == "b" ? Fate::recompute : Fate::keep);
  set_choice(m, report.sites, choice);
  for (const Site& s : report.sites)
    EXPECT_EQ(m.attr(s.module).toModule().attr(s.attribute).toInt(),
              argument_of(s.module == "b" ? Recompute::each_time : Recompute::keep))
        << s.module << " " << s.op;
  EXPECT_TRUE(restore(m));
  for (const Site& s : report.sites) EXPECT_FALSE(m.attr(s.module).toModule().hasattr(s.attribute));
}

}  // namespace
}  // namespace tsmem
