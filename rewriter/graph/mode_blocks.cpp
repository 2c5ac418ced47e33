#include "rewriter/graph/mode_blocks.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>

#include <nlohmann/json.hpp>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/inline_regions.h"
#include "rewriter/graph/origin.h"
#include "rewriter/modules.h"

namespace tsmem {

using namespace torch::jit;
using nlohmann::json;

namespace {

// As TorchScript compiles PyTorch's own classes of these names (torch/autograd/grad_mode.py,
// torch/amp/autocast_mode.py), which its passes know by them.
struct ModeClass {
  const char* name;
  std::vector<std::pair<const char*, c10::TypePtr>> attributes;
  std::string source;
};

ModeClass class_of(const std::string& mode, RunBy by) {
  // TorchScript's own autocast does nothing where the program runs, and is nothing that matching must heed.
  if (mode == "autocast")
    return {
        by == RunBy::program ? "__torch__.tsmem.without_casts" : "__torch__.torch.amp.autocast_mode.autocast",
        {{"fast_dtype", c10::IntType::get()}, {"_enabled", c10::BoolType::get()}, {"device", c10::StringType::get()}},
        R"(
def __init__(self, device_type: str, dtype: int, enabled: bool) -> None:
    self.fast_dtype = dtype
    self._enabled = enabled
    self.device = device_type
def __enter__(self) -> None:
    pass
def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
    pass
)"};
  const bool enable = mode == "enable_grad";
  return {enable ? "__torch__.torch.autograd.grad_mode.enable_grad" : "__torch__.torch.autograd.grad_mode.no_grad",
          {{"prev", c10::BoolType::get()}},
          fmt::format(R"(
def __init__(self) -> None:
    self.prev = False
def __enter__(self) -> None:
    self.prev = torch.is_grad_enabled()
    torch.set_grad_enabled({})
def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
    torch.set_grad_enabled(self.prev)
)",
                      enable ? "True" : "False")};
}

c10::ClassTypePtr compiled(const ModeClass& mode, const std::shared_ptr<CompilationUnit>& unit) {
  if (auto known = unit->get_class(c10::QualifiedName(mode.name))) return known;
  auto type = c10::ClassType::create(c10::QualifiedName(mode.name), unit, /*is_module=*/false);
  for (const auto& [name, of] : mode.attributes) type->addAttribute(name, of);
  unit->register_type(type);
  const SimpleSelf self(type);
  unit->define(c10::QualifiedName(mode.name), mode.source, nativeResolver(), &self);
  return type;
}

// Puts the nodes of `with` in place of those that stand for the borders.
void put_with_blocks(Graph& body, const std::shared_ptr<CompilationUnit>& unit, const json& nodes, RunBy by) {
  std::vector<Value*> open;
  const std::vector<Node*> all(body.nodes().begin(), body.nodes().end());
  for (Node* n : all) {
    if (!is_opaque(n)) continue;
    const int64_t index = origin(n).value();
    const json& border = nodes.at(static_cast<size_t>(index));
    if (!is_border(border)) continue;
    const WithInsertPoint guard(n);
    const auto add = [&](Symbol kind, at::ArrayRef<Value*> inputs, const c10::TypePtr& type) {
      Node* made = body.insertNode(body.create(kind, inputs));
      made->output()->setType(type);
      set_origin(made, index, module_path(n));
      return made;
    };
    if (!begins_region(border)) {
      add(prim::Exit, {open.back()}, TensorType::get());
      open.pop_back();
    } else {
      const auto mode = border.at("mode").get<std::vector<std::string>>();
      Value* object = add(prim::CreateObject, {}, compiled(class_of(mode.at(0), by), unit))->output();
      std::vector<Value*> arguments = {object};
      if (mode.size() > 1)  // of an autocast that is off, whose dtype doesn't matter
        for (const c10::IValue& v :
             {c10::IValue(mode[1]), c10::IValue(static_cast<int64_t>(at::ScalarType::BFloat16)), c10::IValue(false)})
          arguments.push_back(body.insertConstant(v));
      add(prim::CallMethod, arguments, NoneType::get())->s_(attr::name, "__init__");
      add(prim::Enter, {object}, NoneType::get());
      open.push_back(object);
    }
    n->destroy();
  }
}

// Gives each node a place of its own in a source without text, by which it is told from others while it runs
// (module_paths.h).
void number_nodes(Graph& body) {
  const auto nodes = static_cast<size_t>(std::distance(body.nodes().begin(), body.nodes().end()));
  const auto source = std::make_shared<Source>(std::string(nodes, '\n'));
  size_t at = 0;
  for (Node* n : body.nodes()) {
    n->setSourceRange(SourceRange(source, at, at + 1));
    ++at;
  }
}

}  // namespace

Module module_with_blocks(const ExportedProgram& inlined, c10::Device device, RunBy by) {
  Module m = module_of(inlined, device);
  Graph& body = *function_graph(m.type()->findMethod("forward"));
  put_with_blocks(body, m._ivalue()->compilation_unit(), inlined.program.at("graph_module").at("graph").at("nodes"),
                  by);
  if (by == RunBy::program) number_nodes(body);
  return m;
}

}  // namespace tsmem
