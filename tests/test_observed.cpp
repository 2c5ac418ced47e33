// Which norms' results a caller of a graph sees.
#include <gtest/gtest.h>
#include <torch/csrc/jit/ir/irparser.h>

#include "rewriter/rewrite/observed.h"

namespace tsmem {
namespace {

// Whether the value is observed in a graph of these lines, each of which may use the tensors %x and %y and the list %l.
bool observes(const std::string& value, const std::string& lines) {
  torch::jit::Graph graph;
  std::unordered_map<std::string, torch::jit::Value*> values;
  torch::jit::parseIR(
      "graph(%x : Tensor, %y : Tensor, %flag : bool, %n : int):\n  %one : int = prim::Constant[value=1]()\n" + lines,
      &graph, values);
  return observed_values(graph).count(values.at(value)) > 0;
}

TEST(Observed, WhatAResultIsMadeOf) {
  EXPECT_TRUE(observes("v", "  %v : Tensor = aten::relu(%x)\n  %w : Tensor = aten::neg(%v)\n  return (%w)\n"));
  EXPECT_FALSE(observes("v", "  %v : Tensor = aten::relu(%x)\n  %w : Tensor = aten::neg(%v)\n  return (%y)\n"));
}

TEST(Observed, ASizeSaysNothingOfTheValues) {
  EXPECT_FALSE(observes("v", "  %v : Tensor = aten::relu(%x)\n  %s : int[] = aten::size(%v)\n  return (%s)\n"));
}

TEST(Observed, AWriteIsSeenByWhatComesLater) {
  const std::string before = "  %v : Tensor = aten::relu(%x)\n  %t : Tensor = aten::neg(%y)\n";
  const std::string write = "  %w : Tensor = aten::add_(%t, %v, %one)\n", use = "  %u : Tensor = aten::neg(%t)\n";
  EXPECT_TRUE(observes("v", before + write + use + "  return (%u)\n"));
  EXPECT_FALSE(observes("v", before + use + write + "  return (%u)\n"));
}

TEST(Observed, WritesToArgumentsAndTheirViewsAreSeen) {
  EXPECT_TRUE(observes("v",
                       "  %v : Tensor = aten::relu(%x)\n  %t : Tensor = aten::select(%y, %one, %one)\n"
                       "  %w : Tensor = aten::add_(%t, %v, %one)\n  return (%x)\n"));
}

TEST(Observed, WhatIsAppendedToAListThatIsReturned) {
  const std::string append =
      "  %v : Tensor = aten::relu(%x)\n  %l : Tensor[] = prim::ListConstruct(%x)\n"
      "  %m : Tensor[] = aten::append(%l, %v)\n";
  EXPECT_TRUE(observes("v", append + "  return (%l)\n"));
  EXPECT_FALSE(observes("v", append + "  return (%x)\n"));
}

TEST(Observed, ABranchSeesWhatItsResultsAreMadeOf) {
  const auto branch = [](const std::string& result) {
    return "  %v : Tensor = aten::relu(%x)\n  %a : Tensor, %b : Tensor = prim::If(%flag)\n    block0():\n"
           "      %c : Tensor = aten::neg(%v)\n      -> (%c, %x)\n    block1():\n      -> (%x, %x)\n  return (" +
           result + ")\n";
  };
  EXPECT_TRUE(observes("v", branch("%a")));
  EXPECT_FALSE(observes("v", branch("%b")));
  EXPECT_TRUE(observes("flag", branch("%b")));
}

TEST(Observed, ARoundOfALoopSeesWhatTheOneBeforeMade) {
  const auto loop = [](const std::string& result) {
    return "  %true : bool = prim::Constant[value=1]()\n  %v : Tensor = aten::relu(%x)\n"
           "  %a : Tensor, %b : Tensor = prim::Loop(%n, %true, %v, %y)\n    block0(%i : int, %c : Tensor, %d : "
           "Tensor):\n"
           "      %e : Tensor = aten::neg(%c)\n      -> (%true, %d, %e)\n  return (" +
           result + ")\n";
  };
  EXPECT_TRUE(observes("v", loop("%a")));  // from the second round on
  EXPECT_TRUE(observes("v", loop("%b")));
  EXPECT_TRUE(observes("n", loop("%b")));
}

}  // namespace
}  // namespace tsmem
