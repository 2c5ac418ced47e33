#include "rewriter/graph/module_stack.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

namespace tsmem {

using nlohmann::json;
using torch::jit::Module;

namespace {

// "main.<locals>.Block" as "main._locals_.Block".
std::string identifiers(const std::string& python) {
  std::string name;
  for (const char c : python) {
    const bool first = name.empty() || name.back() == '.';
    if (c == '.' && first) continue;
    if (first && std::isdigit(static_cast<unsigned char>(c))) name += '_';
    name += std::isalnum(static_cast<unsigned char>(c)) || c == '.' ? c : '_';
  }
  while (name.ends_with('.')) name.pop_back();
  return name;
}

}  // namespace

// "L__self__,,torchvision.models.resnet.ResNet;L__self__layer1.0,layer1.0,torchvision.models.resnet.BasicBlock"
std::vector<ModuleCall> module_stack(const json& node) {
  std::vector<ModuleCall> calls;
  if (!node.contains("metadata")) return calls;
  const std::string stack = node["metadata"].value("nn_module_stack", "");
  for (size_t begin = 0; begin < stack.size();) {
    const size_t end = std::min(stack.find(';', begin), stack.size());
    const size_t comma = stack.find(',', begin), second = stack.find(',', comma + 1);
    if (comma < end && second < end) {
      const std::string call = stack.substr(comma + 1, second - comma - 1);
      calls.push_back({call.substr(0, call.find('@')), call, stack.substr(second + 1, end - second - 1)});
    }
    begin = end + 1;
  }
  return calls;
}

ModuleNames::ModuleNames(const json& graph) {
  for (const json& node : graph.at("nodes"))
    for (const ModuleCall& call : module_stack(node))
      if (const std::string name = identifiers(call.python); !name.empty())
        names_.try_emplace(call.path, "__torch__." + name);
}

c10::QualifiedName ModuleNames::of(const std::string& path) const {
  const auto known = names_.find(path);
  return known == names_.end() ? c10::QualifiedName("__torch__.Module") : known->second;
}

std::optional<Module> module_at(Module m, const std::string& path, const ModuleNames& names) {
  for (size_t from = 0; from <= path.size();) {
    const size_t dot = std::min(path.find('.', from), path.size());
    const std::string name = path.substr(from, dot - from);
    if (name.empty()) return std::nullopt;
    if (!m.hasattr(name)) {
      Module child(names.of(path.substr(0, dot)), m._ivalue()->compilation_unit(), /*shouldMangle=*/true);
      child.register_attribute("training", c10::BoolType::get(), true);
      m.register_module(name, child);
    }
    if (!m.attr(name).isModule()) return std::nullopt;
    m = m.attr(name).toModule();
    from = dot + 1;
  }
  return m;
}

}  // namespace tsmem
