// A method with its callees inlined on a copy, each node knowing where it came from.
//
// Patterns are matched on the view, in which calls and branches with a constant condition are transparent. The same
// copier then builds the rewritten body, in which only those calls are inlined that a match crosses (apply.h).
#pragma once
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace tsmem {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// A call or constant branch that was entered to reach a node. The root of a method is nullptr. Scopes are interned: the
// same way in is the same pointer, in the view and in the rewritten body alike.
struct Scope {
  const Scope* parent;
  Node* node;              // the call or the If, in the graph that defines it
  int branch;              // -1 for a call, else the block taken
  std::string path;        // of the module whose code this is, relative to the method's own module ("" for itself)
  bool of_module;          // entered by a call of a module's method: that method is rewritten in its own right
  std::string method;      // of a module's method call
  c10::ClassTypePtr type;  // of the module
  bool assumed = false;    // the branch that an attribute decides, which code from outside may set
};

void add_with_parents(const Scope* s, std::unordered_set<const Scope*>& scopes);

struct Scopes {
  const Scope* enter(const Scope* parent, Node* node, int branch, const Value* self);
  // The branch of an If that has been entered as the one that its condition, a constant, leaves.
  std::optional<int> branch_taken(const Scope* parent, Node* node) const;
  void assume(const Scope* branch);
  std::map<std::tuple<const Scope*, Node*, int>, std::unique_ptr<Scope>> all;
};

// Where a node of a copy comes from.
struct Place {
  const Scope* scope;
  Node* node;
};

// The path of the module whose code it is, relative to the method's own module: that of its scope, or what a node of a
// flat body remembers (graph/exported_graph.h).
std::string module_path_of(const Place& place);

struct View {
  std::shared_ptr<Graph> graph;
  std::unordered_map<const Node*, Place> places;                    // of the nodes of `graph` that were copied
  std::map<std::pair<const Scope*, Node*>, Node*> copies;           // the other way round
  std::unordered_set<const Scope*> entered;                         // the calls and branches inlined
  std::unordered_map<const Scope*, std::vector<Value*>> arguments;  // of the calls inlined; valid until a node goes
  // What dead code overwrites: TorchScript need not see that it is dead once other operators stand there.
  std::vector<Value*> overwritten_unused;
  std::unordered_set<const Node*> unused;           // norms that may go, and what only these use
  std::vector<std::pair<Value*, int>> assumptions;  // conditions that attributes decide, and the branch taken
};

// Whether a norm goes too whose result nothing uses but which updates its running statistics. TorchScript drops some of
// these, most of them from the second call on: who needs to know what may run lets them stay.
enum class UnusedNorms { go, stay };

// Takes out what TorchScript does not run, as nothing uses its result: a dropout there draws nothing. Returns the calls
// and branches in which tensors were made there.
std::unordered_set<const Scope*> remove_dead_code(View& view, UnusedNorms norms);

// The graph of the method or function that a prim::CallMethod or prim::CallFunction runs; null where that isn't known
// before run time (interfaces, hooks, built-in functions).
std::shared_ptr<Graph> callee(const Node* call);
using BodyOf = std::function<std::shared_ptr<Graph>(const Node* call)>;

// Whether the dictionary or list at a path of attributes has a key; nothing where that is not known.
using Contains = std::function<std::optional<bool>(const std::string& path, const c10::IValue& key)>;

// Copies a graph; calls and constant branches for which `inlines` is true are replaced by their contents. `exact`: all
// else is as it was. `contains`: what decides more branches.
View copy_graph(const Graph& source, Scopes& scopes, const std::function<bool(const Scope*)>& inlines,
                const BodyOf& body_of = callee, bool exact = false, const Contains& contains = {});

// Whether n begins or ends a `with autocast` block of the model's own code.
bool borders_autocast(const Node* n);

// Whether n, or a place or a call around it, is in such a block.
bool inside_autocast(const Node* n);
bool in_autocast(const Place& place);

// Whether n begins or ends a `with torch.no_grad()` block.
bool borders_no_grad(const Node* n);

// The attributes that lead from `self` to a module value: "layer1.0" for self.layer1.0; nullopt for other values.
std::optional<std::string> attribute_path(const Value* v);

// "a" + "b" = "a.b"
std::string join_path(const std::string& a, const std::string& b);

}  // namespace tsmem
