// Which nodes of a graph run before which, each in whichever branches and loops.
#pragma once
#include "rewriter/rewrite/view.h"

namespace tsmem {

// Whether `a` has run when `b` runs.
bool runs_before(const Node* a, const Node* b);

// Whether n has run, once and in the same round of its loops, whenever `later` runs.
bool always_after(const Node* later, const Node* n);

// Whether `later` may run when n has run.
bool may_run_after(const Node* later, const Node* n);

// Whether two nodes are in different branches of one If: at most one of them runs.
bool exclusive(const Node* a, const Node* b);

// Whether a loop is around both nodes.
bool in_one_loop(const Node* a, const Node* b);

// Whether only branches, no loops, lie between a block and a node in it.
bool in_branches_of(const Node* n, const Block* block);

// Whether n follows an If that `inner` is in, with branches alone between them.
bool exits_into(const Node* inner, const Node* n);

}  // namespace tsmem
