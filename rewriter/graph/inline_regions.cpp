#include "rewriter/graph/inline_regions.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>

#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "rewriter/error.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/origin.h"
#include "rewriter/modules.h"

namespace tsmem {

using namespace torch::jit;
using nlohmann::json;

namespace {

const char* const kBegin = "tsmem.region.begin";
const char* const kEnd = "tsmem.region.end";
const char* const kTables[] = {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values",
                               "custom_obj_values"};

// A region: its mode, as a border has it ("no_grad", "enable_grad", "autocast" and a type of devices), its graph, and
// what goes in.
struct ModeRegion {
  std::vector<std::string> mode;
  const json* graph = nullptr;
  std::vector<const json*> inputs;
};

std::optional<ModeRegion> region_of(const json& node) {
  const auto target = node.at("target").get<std::string>();
  const bool autocast = target == "torch.ops.higher_order.wrap_with_autocast";
  if (!autocast && target != "torch.ops.higher_order.wrap_with_set_grad_enabled") return std::nullopt;
  const json& given = node.at("inputs");
  const auto argument = [&](size_t i) -> const json& { return given.at(i).at("arg"); };
  const size_t at = autocast ? 4 : 1;  // device, dtype, enabled, cache; or enabled
  ModeRegion region;
  region.graph = &argument(at).at("as_graph").at("graph");
  const bool enabled = argument(autocast ? 2 : 0).at("as_bool").get<bool>();
  // What an autocast casts, TorchScript decides by other lists than eager PyTorch.
  if (autocast && enabled) return std::nullopt;
  if (autocast)
    region.mode = {"autocast", argument(0).at("as_string").get<std::string>()};
  else
    region.mode = {enabled ? "enable_grad" : "no_grad"};
  for (size_t i = at + 1; i < given.size(); ++i) region.inputs.push_back(&argument(i));
  return region;
}

// "a;b;c" and "a;b;d": "a;b".
std::string common_stack(const std::string& a, const std::string& b) {
  size_t common = 0;
  for (size_t i = 0;; ++i) {
    const bool a_ends = i >= a.size() || a[i] == ';', b_ends = i >= b.size() || b[i] == ';';
    if (a_ends && b_ends) common = i;
    if (i >= a.size() || i >= b.size() || a[i] != b[i]) return a.substr(0, common);
  }
}

std::string stack_of(const json& node) {
  return node.contains("metadata") ? node["metadata"].value("nn_module_stack", "") : "";
}

bool is_border(const json& node) { return node.at("target") == kBegin || node.at("target") == kEnd; }

class Inliner {
 public:
  explicit Inliner(json& graph) : graph_(graph) {
    for (const std::string& name : names_in(graph.at("inputs"))) taken_.insert(name);
    for (const json& node : graph.at("nodes"))
      for (const std::string& name : names_in(node.at("outputs"))) taken_.insert(name);
  }

  void run() {
    json nodes = json::array();
    std::swap(nodes, graph_["nodes"]);
    for (json& node : nodes) add(std::move(node), {});
    for (json& output : graph_["outputs"]) rename(output, outer_);
  }

 private:
  using Names = std::unordered_map<std::string, std::string>;

  static void rename(json& argument, const Names& names) {
    for_each_name(argument, [&](json& name) {
      if (const auto other = names.find(name.get<std::string>()); other != names.end()) name = other->second;
    });
  }

  // Adds a node, or its region's.
  void add(json node, const std::string& stack) {
    if (is_border(node)) throw json::other_error::create(501, "a border of no region", nullptr);
    for (json& input : node["inputs"]) rename(input["arg"], outer_);
    if (!stack.empty() && stack_of(node).empty()) node["metadata"]["nn_module_stack"] = stack;
    const auto region = region_of(node);
    if (!region || !add_region(*region, node)) graph_["nodes"].push_back(std::move(node));
  }

  // False where its inputs and results are no tensors or numbers by name.
  bool add_region(const ModeRegion& region, const json& node) {
    json inner = *region.graph;
    const auto formal = names_in(inner.at("inputs")), results = names_in(inner.at("outputs"));
    const auto outputs = names_in(node.at("outputs"));
    if (formal.size() != region.inputs.size() || outputs.size() != results.size()) return false;
    Names names;
    for (size_t i = 0; i < formal.size(); ++i) {
      const auto given = names_in(json::array({*region.inputs[i]}));
      if (given.size() != 1) return false;
      names[formal[i]] = given[0];
    }
    std::string stack;
    bool first = true;
    for (const json& n : inner.at("nodes")) {
      for (const std::string& name : names_in(n.at("outputs"))) names[name] = unused(name);
      if (const std::string own = stack_of(n); !own.empty())
        stack = std::exchange(first, false) ? own : common_stack(stack, own);
    }
    for (const char* table : kTables)
      if (inner.contains(table))
        for (const auto& [name, value] : inner[table].items())
          if (const auto other = names.find(name); other != names.end()) graph_[table].emplace(other->second, value);
    if (stack.empty()) stack = stack_of(node);
    graph_["nodes"].push_back(border(kBegin, region.mode, stack));
    const Names around = std::exchange(outer_, names);
    for (json& n : inner["nodes"]) {
      for (json& output : n["outputs"]) rename(output, names);
      add(std::move(n), stack);
    }
    const Names inside = std::exchange(outer_, around);
    graph_["nodes"].push_back(border(kEnd, region.mode, stack));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto known = inside.find(results[i]);
      call(outputs[i], known == inside.end() ? results[i] : known->second);
    }
    return true;
  }

  // What the graph around calls `name`, perhaps by another name still, is `now`.
  void call(const std::string& name, const std::string& now) {
    bool known = false;
    for (auto& [theirs, ours] : outer_)
      if (ours == name) {
        ours = now;
        known = true;
      }
    if (!known) outer_[name] = now;
  }

  static json border(const char* target, const std::vector<std::string>& mode, const std::string& stack) {
    return {{"target", target},
            {"inputs", json::array()},
            {"outputs", json::array()},
            {"mode", mode},
            {"metadata", {{"nn_module_stack", stack}}}};
  }

  std::string unused(const std::string& name) {
    std::string other = name;
    for (int k = 1; !taken_.insert(other).second; ++k) other = fmt::format("{}_{}", name, k);
    return other;
  }

  json& graph_;
  std::unordered_set<std::string> taken_;
  Names outer_;  // the names by now of what the graph that is gone through calls otherwise
};

// As TorchScript compiles PyTorch's own classes of these names (torch/autograd/grad_mode.py,
// torch/amp/autocast_mode.py), which its passes know by them.
struct ModeClass {
  const char* name;
  std::vector<std::pair<const char*, c10::TypePtr>> attributes;
  std::string source;
};

ModeClass class_of(const std::string& mode) {
  if (mode == "autocast")
    return {
        "__torch__.torch.amp.autocast_mode.autocast",
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
void put_with_blocks(Graph& body, const std::shared_ptr<CompilationUnit>& unit, const json& nodes) {
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
    if (border.at("target") == kEnd) {
      add(prim::Exit, {open.back()}, TensorType::get());
      open.pop_back();
    } else {
      const auto mode = border.at("mode").get<std::vector<std::string>>();
      Value* object = add(prim::CreateObject, {}, compiled(class_of(mode.at(0)), unit))->output();
      std::vector<Value*> arguments = {object};
      if (mode.size() > 1)
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

}  // namespace

ExportedProgram with_regions_inline(ExportedProgram program) {
  try {
    Inliner(program.program.at("graph_module").at("graph")).run();
  } catch (const json::exception&) {
    throw Error(
        ErrorKind::input,
        "'" + program.path + "' is damaged: its graph is not as torch.export writes it; copy or save it again.");
  }
  return program;
}

Module module_with_blocks(const ExportedProgram& inlined, c10::Device device) {
  Module m = module_of(inlined, device);
  put_with_blocks(*function_graph(m.type()->findMethod("forward")), m._ivalue()->compilation_unit(),
                  inlined.program.at("graph_module").at("graph").at("nodes"));
  return m;
}

}  // namespace tsmem
