#include "rewriter/graph/outline.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "rewriter/modules.h"
#include "rewriter/rewrite/install.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

using namespace torch::jit;

namespace {

constexpr size_t kDeepestModule = 64;

bool is_below(const std::string& path, const std::string& parent) {
  return !path.empty() && (parent.empty() || path.starts_with(parent + "."));
}

// What every body makes for itself: constants, and the modules' attributes.
bool is_free(const Node* n) { return n->kind() == prim::Constant || n->kind() == prim::GetAttr; }

// A node of the body, with the calls of modules around it.
struct Step {
  Node* node;
  std::vector<ModuleCall> calls;
};

class Outliner {
 public:
  Outliner(const Module& root, Graph& flat, const CallsOf& calls) : root_(root), flat_(flat) {
    for (Node* n : flat.nodes()) {
      if (is_free(n)) continue;
      const auto known = calls.find(n);
      steps_.push_back({n, known == calls.end() ? std::vector<ModuleCall>{} : valid_calls(known->second)});
    }
    for (size_t i = 0; i < steps_.size(); ++i) place_[steps_[i].node] = i;
  }

  void run() {
    Body body{std::make_shared<Graph>(), "", {}};
    body.values[flat_.inputs()[0]] = body.graph->addInput("self")->setType(root_.type());
    for (const Value* v : flat_.inputs().slice(1)) body.values[v] = add_input(*body.graph, v);
    fill(body, 0, steps_.size(), 0);
    body.graph->registerOutput(value(body, flat_.outputs()[0]));
    replace_body(flat_, *body.graph);
  }

 private:
  struct Body {
    std::shared_ptr<Graph> graph;
    std::string path;  // of its module
    std::unordered_map<const Value*, Value*> values;
  };

  // The longest beginning of calls whose modules lie one below another.
  std::vector<ModuleCall> valid_calls(const std::vector<ModuleCall>& calls) const {
    std::vector<ModuleCall> valid;
    std::string path;
    for (const ModuleCall& call : calls) {
      if (call.path.empty()) continue;
      if (!is_below(call.path, path) || !is_module(call.path) || valid.size() == kDeepestModule) break;
      valid.push_back(call);
      path = call.path;
    }
    return valid;
  }

  bool is_module(const std::string& path) const {
    Module m = root_;
    for (size_t from = 0; from <= path.size();) {
      const size_t dot = std::min(path.find('.', from), path.size());
      const std::string name = path.substr(from, dot - from);
      if (!m.hasattr(name) || !m.attr(name).isModule()) return false;
      m = m.attr(name).toModule();
      from = dot + 1;
    }
    return true;
  }

  static Value* add_input(Graph& g, const Value* like) {
    Value* v = g.addInput()->setType(like->type());
    if (like->hasDebugName()) v->setDebugName(like->debugNameBase());
    return v;
  }

  // Its name.
  static std::string add_method(const Module& m, const std::shared_ptr<Graph>& body) {
    std::string name = "forward";
    for (int k = 1; m.type()->findMethod(name) || m.hasattr(name); ++k) name = fmt::format("forward_{}", k);
    const auto unit = m._ivalue()->compilation_unit();
    m.type()->addMethod(unit->create_function(c10::QualifiedName(*m.type()->name(), name), body));
    return name;
  }

  // The steps from `begin` to `end`, all of them in the same calls down to `depth`.
  void fill(Body& body, size_t begin, size_t end, size_t depth) {
    for (size_t i = begin; i < end;) {
      if (steps_[i].calls.size() <= depth) {
        copy(body, steps_[i++].node);
        continue;
      }
      const ModuleCall& call = steps_[i].calls[depth];
      size_t last = i + 1;
      while (last < end && steps_[last].calls.size() > depth && steps_[last].calls[depth].call == call.call) ++last;
      call_module(body, call.path, i, last, depth);
      i = last;
    }
  }

  void copy(Body& body, Node* n) {
    Node* twin = body.graph->insertNode(body.graph->createClone(n, [&](Value* v) { return value(body, v); }));
    for (size_t k = 0; k < n->outputs().size(); ++k) body.values[n->output(k)] = twin->output(k);
  }

  // A value of the flat body in this one.
  Value* value(Body& body, const Value* v) {
    const auto known = body.values.find(v);
    if (known != body.values.end()) return known->second;
    const Node* n = v->node();
    if (n->kind() == prim::Constant)
      return body.graph->insertNode(body.graph->createClone(const_cast<Node*>(n), nullptr))->output();
    // An attribute, or a module; each body reads it once.
    const std::string path = attribute_path(v).value();
    return body.values[v] = read(body, body.path.empty() ? path : path.substr(body.path.size() + 1), v);
  }

  // What lies at `path` below the body's own module.
  Value* read(Body& body, const std::string& path, const Value* like) {
    Value* at = body.graph->inputs()[0];
    for (size_t from = 0; from <= path.size();) {
      const size_t dot = std::min(path.find('.', from), path.size());
      at = body.graph->insertGetAttr(at, path.substr(from, dot - from));
      from = dot + 1;
    }
    if (like && like->hasDebugName()) at->setDebugName(like->debugNameBase());
    return at;
  }

  // The values that the steps read and others make, in the order of their use. Attributes of modules elsewhere (a tied
  // weight) are among them.
  std::vector<const Value*> read_by(size_t begin, size_t end, const std::string& path) const {
    std::vector<const Value*> values;
    std::unordered_set<const Value*> seen;
    const std::function<void(const Node*)> visit = [&](const Node* n) {
      for (const Value* v : n->inputs())
        if (comes_from_outside(v, begin, end, path) && seen.insert(v).second) values.push_back(v);
      for (const Block* b : n->blocks()) {
        for (const Node* inner : b->nodes()) visit(inner);
        visit(b->return_node());
      }
    };
    for (size_t i = begin; i < end; ++i) visit(steps_[i].node);
    return values;
  }

  bool comes_from_outside(const Value* v, size_t begin, size_t end, const std::string& path) const {
    const Node* n = v->node();
    if (n->owningBlock() != flat_.block()) return false;  // made in a branch, by a node of its own there
    if (n->kind() == prim::Constant) return false;
    if (n->kind() == prim::GetAttr) return !is_below(attribute_path(v).value(), path);
    const auto made = place_.find(n);
    return made == place_.end() || made->second < begin || made->second >= end;
  }

  // The values that the steps make and others read.
  std::vector<const Value*> read_elsewhere(size_t begin, size_t end) const {
    std::vector<const Value*> values;
    for (size_t i = begin; i < end; ++i)
      for (const Value* v : steps_[i].node->outputs())
        if (std::any_of(v->uses().begin(), v->uses().end(), [&](const Use& use) {
              const Node* n = use.user;
              while (n->owningBlock() != flat_.block()) n = n->owningBlock()->owningNode();
              const auto user = place_.find(n);
              return user == place_.end() || user->second < begin || user->second >= end;
            }))
          values.push_back(v);
    return values;
  }

  void call_module(Body& caller, const std::string& path, size_t begin, size_t end, size_t depth) {
    const auto taken = read_by(begin, end, path), given = read_elsewhere(begin, end);
    Body body{std::make_shared<Graph>(), path, {}};
    const Module m = submodule(root_, path);
    body.graph->addInput("self")->setType(m.type());
    for (const Value* v : taken) body.values[v] = add_input(*body.graph, v);
    fill(body, begin, end, depth + 1);
    std::vector<Value*> results;
    for (const Value* v : given) results.push_back(body.values.at(v));
    Graph& inner = *body.graph;
    inner.registerOutput(results.size() == 1 ? results[0]
                         : results.empty()   ? inner.insertConstant(IValue())
                                             : inner.insertNode(inner.createTuple(results))->output());
    const std::string name = add_method(m, body.graph);

    Graph& g = *caller.graph;
    std::vector<Value*> arguments = {
        read(caller, path.substr(caller.path.empty() ? 0 : caller.path.size() + 1), nullptr)};
    for (const Value* v : taken) arguments.push_back(value(caller, v));
    Node* call = g.insertNode(g.create(prim::CallMethod, arguments, 1));
    call->s_(attr::name, name);
    call->output()->setType(inner.outputs()[0]->type());
    if (given.size() == 1) {
      caller.values[given[0]] = call->output();
      call->output()->setDebugName(given[0]->debugNameBase());
    } else if (!given.empty()) {
      Node* apart = g.insertNode(g.createTupleUnpack(call->output()));
      for (size_t k = 0; k < given.size(); ++k) caller.values[given[k]] = apart->output(k);
    }
  }

  Module root_;
  Graph& flat_;
  std::vector<Step> steps_;
  std::unordered_map<const Node*, size_t> place_;
};

}  // namespace

void outline(Module root, const CallsOf& calls) {
  Outliner(root, *function_graph(root.type()->findMethod("forward")), calls).run();
}

}  // namespace tsmem
