// What an exported graph says of its tensors: "tensor_values".
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

// A size in the JSON's terms (SymInt): a number, or an expression in the program's symbols and the number that it had
// when the program was exported.
struct ExportedSize {
  int64_t number = 0;
  std::string expression;  // "" for a number
};
ExportedSize exported_size(const nlohmann::json& size);

// Describes the results of one of `graph`'s nodes that nothing describes yet, by running it on the meta device. A size
// that is that of an operand is written as the operand's is, so that dynamic sizes stay so.
void describe_results(nlohmann::json& graph, const nlohmann::json& node);

// The same for all nodes; drops descriptions of what is not there any more.
void describe_tensors(nlohmann::json& graph);

// The arguments of a program's forward as it was exported with, on the meta device: shapes and dtypes. nullopt where
// one of them is no tensor.
std::optional<std::vector<at::Tensor>> arguments_on_meta(const nlohmann::json& graph_module);

}  // namespace tsmem
