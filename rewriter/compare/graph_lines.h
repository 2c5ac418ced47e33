// Graphs as lines of text, whose values have names that are easy to read and the same in both graphs of a comparison.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <vector>

namespace tsmem {

std::vector<std::string> graph_lines(const torch::jit::Graph& graph);

// Both graphs' lines. Values of `b` have the names of those of `a` that their lines correspond to, so that only real
// changes differ.
struct LinesOfBoth {
  std::vector<std::string> a, b;
};
LinesOfBoth graph_lines(const torch::jit::Graph& a, const torch::jit::Graph& b);

}  // namespace tsmem
