// A module's tree: its classes, submodules, attributes and methods.
#pragma once
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

// The module at a path ("layer1.0"; "" for the root).
torch::jit::Module submodule(torch::jit::Module m, const std::string& path);

// Distinct classes of the module tree with the path of their first instance ("" for the root), parents first.
struct ModuleClass {
  c10::ClassTypePtr type;
  std::vector<std::string> paths;  // every instance's
};
std::vector<ModuleClass> module_classes(const torch::jit::Module& module);

// The tensor at a path of attributes ("bn1.weight"); undefined where there is none.
at::Tensor attribute(const torch::jit::Module& m, const std::string& path);

// Whatever is there; nothing where there is no such attribute.
std::optional<c10::IValue> value_at(const torch::jit::Module& m, const std::string& path);

// Null where there is no function, or it has no graph.
torch::jit::GraphFunction* graph_function(torch::jit::Function* f);

// Of a function that has one.
std::shared_ptr<torch::jit::Graph> function_graph(torch::jit::Function* f);

}  // namespace tsmem
