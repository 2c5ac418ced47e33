// What TorchScript makes of a function's code before its callers get it: dead code is gone by then that TorchScript
// would leave where it stands in the callers.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// Whether n is a norm that updates running statistics, or may do so.
bool updates_statistics(const Node* n);

// Whether n draws random numbers and overwrites its argument with what it makes of them, as an in-place dropout does.
bool draws_in_place(const Node* n);

// Whether a dropout with this probability is known to drop nothing or all, whichever branch is taken.
bool zero_or_one(const Value* p);

// Whether n draws random numbers.
bool draws(const Node* n);

// In the order in which they run.
std::vector<Node*> nodes_where(Graph& graph, bool (*holds)(const Node*));

// A node of the original and the calls around it, from the inside: the same whatever else was inlined.
using Way = std::vector<const Node*>;
Way way_of(const Place& place);

// A function's code as its callers get it, and the ways to those of its nodes of which one of the above is true.
struct Preoptimized {
  std::shared_ptr<Graph> graph;
  std::map<const Node*, Way> ways;
};

// `callees`: those of the functions that were called so far.
Preoptimized preoptimized(const Graph& source, const BodyOf& body_of, std::map<const Graph*, Preoptimized>& callees);

// Takes n, the result of which is dead or its first input itself, out of a copy. What is made of the result is made of
// that input.
void leave_out(Node* n, View& body);

// What draws in place in a copy of `source`, and which TorchScript takes out as dead before the first call of `source`
// or of what it calls, so that nothing is drawn. In a rewritten body there may be less to simplify, and then it would
// not look for dead code.
std::vector<Node*> dead_draws(const View& body, const Graph& source);

}  // namespace tsmem
