// The operators of a view that patterns can mean, and the `with` blocks around its nodes.
#pragma once
#include <functional>

#include "rewriter/rewrite/canonical.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

// What the loaded module says of tensors among its attributes, by path from the method's own module, over all instances
// of the class.
struct Attributes {
  std::function<bool(const std::string&, const std::string&)> alias;  // may be the same memory (tied parameters)
  std::function<bool(const std::string&)> integral;                   // is a tensor of integers: a counter
  // Some method of the model writes to it in place, be it one that is called between forward and backward.
  std::function<bool(const std::string&)> written = [](const std::string&) { return false; };
  std::set<std::string> set = {};  // the names of those that other methods than forward give tensors
};

struct Operators {
  std::unordered_map<const Node*, CanonicalOp> canonical;
  std::unordered_map<std::string, std::vector<Node*>> by_name;  // in the order in which they run
  std::unordered_set<const Node*> in_autocast, in_no_grad;
  std::unordered_map<const Node*, int> with_blocks;  // a number for the `with` blocks around a node
  std::set<std::string> set_attributes;              // the names of those that are given tensors, of whatever module
};

// Whether n runs code that can't be looked into: a call that is not known before run time, or another task.
bool runs_unseen(const Node* n);

// What such code is given to write to: tensors, and lists and the like of them. Attributes are in ModelWrites.
std::vector<Value*> given_unseen(Node* n);

// Whether a value of this type may be a tensor, or hold one.
bool may_hold_tensor(const c10::TypePtr& type);

Operators collect_operators(const View& view, const Attributes& attributes);

// A sum or product with a number that was traced: a constant tensor without dimensions.
bool by_traced_number(const CanonicalOp& op);
std::optional<c10::IValue> traced_number(const Value* v);

// A node by its module's path and operator, as reasons name it.
std::string name_of(const View& view, const Node* n);

// A tensor, or an optional one.
bool may_be_tensor(const Value* v);

}  // namespace tsmem
