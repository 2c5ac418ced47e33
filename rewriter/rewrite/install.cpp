#include "rewriter/rewrite/install.h"

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>

#include <functional>
#include <unordered_set>

#include "rewriter/error.h"
#include "rewriter/method_call.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;

using namespace added_names;

void replace_body(Graph& graph, Graph& body) {
  while (!graph.outputs().empty()) graph.eraseOutput(graph.outputs().size() - 1);
  for (auto it = graph.nodes().rbegin(); it != graph.nodes().rend(); it = graph.nodes().rbegin()) it->destroy();
  WithInsertPoint at_end(graph.block());
  for (Value* out : insertGraph(graph, body, graph.inputs())) graph.registerOutput(out);
  // insertGraph gives no names; they make the saved code readable.
  std::function<void(Block*, Block*)> name = [&](Block* to, Block* source) {
    auto s = source->nodes().begin();
    for (Node* n : to->nodes()) {
      for (size_t i = 0; i < n->outputs().size(); ++i)
        if ((*s)->output(i)->hasDebugName()) n->output(i)->setDebugName((*s)->output(i)->debugName());
      for (size_t b = 0; b < n->blocks().size(); ++b) name(n->blocks()[b], (*s)->blocks()[b]);
      ++s;
    }
  };
  name(graph.block(), body.block());
}

// A method of the same signature under another name.
static Function* add_method(const c10::ClassTypePtr& type, const std::string& name, const FunctionSchema& s,
                            const std::shared_ptr<Graph>& body) {
  Function* f = type->compilation_unit()->create_function(c10::QualifiedName(*type->name(), name), body);
  f->setSchema(FunctionSchema(name, s.overload_name(), s.arguments(), s.returns(), s.is_vararg(), s.is_varret()));
  type->addMethod(f);
  return f;
}

void install(const c10::ClassTypePtr& type, const std::string& method, const std::shared_ptr<Graph>& body) {
  GraphFunction* function = graph_function(type->findMethod(method));
  if (!type->findMethod(kOriginal + method))
    add_method(type, kOriginal + method, function->getSchema(), function->graph()->copy());
  replace_body(*function->graph(), *body);
  function->clear_optimized_graphs();
}

void check_autocast(const Module& module, const std::string& method) {
  GraphFunction* function = graph_function(module.type()->findMethod(method));
  if (!function) throw Error(ErrorKind::request, fmt::format("There is no method '{}' to run under autocast", method));
  Scopes scopes;
  const View view = copy_graph(*function->graph(), scopes, [](const Scope*) { return true; });
  for (const auto& [n, place] : view.places)
    if (borders_autocast(n))
      throw Error(ErrorKind::request,
                  fmt::format("{} has an autocast block of its own{}, which TorchScript gets wrong under another "
                              "autocast: leave amp out, or take the block out of the model",
                              method,
                              place.scope && !place.scope->path.empty() ? fmt::format(" (in {})", place.scope->path)
                                                                        : std::string()));
}

void write_autocast(Module& module, const std::string& method, const std::string& dtype) {
  check_autocast(module, method);
  const c10::ClassTypePtr type = module.type();
  GraphFunction* function = graph_function(type->findMethod(method));
  add_method(type, kAmp + method, function->getSchema(), function->graph()->copy());
  auto body = std::make_shared<Graph>();
  for (Value* in : function->graph()->inputs()) body->addInput()->copyMetadata(in);
  WithInsertPoint here(body->block());
  body->registerOutput(insert_method_call(*body, "tsmem::autocast", body->inputs()[0], kAmp + method,
                                          body->inputs().slice(1), {dtype}, function->graph()->outputs()[0]->type()));
  install(type, method, body);
}

std::string autocast_of(const Module& module, const std::string& method) {
  GraphFunction* function = graph_function(module.type()->findMethod(method));
  if (!function) return "";
  for (Node* n : function->graph()->nodes())
    if (n->kind() == Symbol::fromQualString("tsmem::autocast"))
      if (auto dtype = toIValue(n->input(3))) return dtype->toStringRef();
  return "";
}

bool is_rewritten(const Module& module) {
  for (const ModuleClass& c : module_classes(module))
    if (!added_methods(*c.type).empty()) return true;
  return false;
}

bool restore(Module& module) {
  bool any = false;
  for (const ModuleClass& c : module_classes(module)) {
    for (const std::string& name : added_methods(*c.type)) {
      any = true;
      if (name.starts_with(kOriginal)) {
        GraphFunction* live = graph_function(c.type->findMethod(name.substr(kOriginal.size())));
        GraphFunction* kept = graph_function(c.type->findMethod(name));
        if (!live || !kept)
          throw Error(
              ErrorKind::input,
              fmt::format("{} keeps the original of a method that it no longer has ({}); the file can't be restored",
                          c.type->name()->qualifiedName(), name));
        replace_body(*live->graph(), *kept->graph()->copy());
        live->clear_optimized_graphs();
      }
      c.type->unsafeRemoveMethod(name);
      c.type->compilation_unit()->unsafeRemoveMethod(c10::QualifiedName(*c.type->name(), name));
    }
    std::vector<std::string> attributes;
    for (size_t i = c.type->numAttributes(); i-- > 0;)
      if (c.type->getAttributeName(i).starts_with(kPrefix)) attributes.push_back(c.type->getAttributeName(i));
    if (attributes.empty()) continue;
    any = true;
    for (const std::string& name : attributes) {
      std::unordered_set<const c10::ivalue::Object*> done;  // a shared module has several paths
      for (const std::string& path : c.paths)
        if (auto object = submodule(module, path)._ivalue(); done.insert(object.get()).second)
          object->unsafeRemoveAttr(name);
      c.type->unsafeRemoveAttribute(name);
    }
  }
  return any;
}

}  // namespace tsmem
