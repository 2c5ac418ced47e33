// A graph as lines that read like code: constants, attributes and lists of them stand where they are used.
#pragma once
#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <string>
#include <variant>
#include <vector>

namespace tsmem {

// Text with values in it that get their names later.
struct PrintedLine {
  std::vector<std::variant<std::string, const torch::jit::Value*>> pieces;
  std::vector<const torch::jit::Value*> defines;

  std::string text(const std::function<std::string(const torch::jit::Value*)>& name) const;
};

// `nested`: the lines of a graph that is an attribute of a node.
std::vector<PrintedLine> printed(const torch::jit::Graph& graph,
                                 const std::function<std::vector<std::string>(const torch::jit::Graph&)>& nested);

// The module whose method the graph is, null where it is a function's.
const torch::jit::Value* self_of(const torch::jit::Graph& graph);

}  // namespace tsmem
