// Whose code a node of an exported graph is: its "nn_module_stack".
#pragma once
#include <ATen/core/qualified_name.h>
#include <torch/csrc/jit/api/module.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

// A call of a module on the way to a node.
struct ModuleCall {
  std::string path;    // "layer1.0"; "" for the root
  std::string call;    // the path with the number of the call: "layer1.0.relu@1" is the second
  std::string python;  // the module's class: "torchvision.models.resnet.BasicBlock"; "" where it isn't known
};

// The calls that lead to a node, outermost first; none where the graph doesn't say.
std::vector<ModuleCall> module_stack(const nlohmann::json& node);

// The class of each module that the graph calls, by its path, as a name that TorchScript can have:
// "__torch__.torchvision.models.resnet.BasicBlock".
class ModuleNames {
 public:
  explicit ModuleNames(const nlohmann::json& graph);
  c10::QualifiedName of(const std::string& path) const;  // "__torch__.Module" where the graph has no class for it

 private:
  std::map<std::string, c10::QualifiedName> names_;
};

// The module at a path ("layer1.0"), with those on the way, made with these names where they are not there yet. Nothing
// where something else has such a name.
std::optional<torch::jit::Module> module_at(torch::jit::Module root, const std::string& path, const ModuleNames& names);

}  // namespace tsmem
