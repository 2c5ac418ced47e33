// Norms whose result nothing uses, and which update their running statistics all the same.
#pragma once
#include "rewriter/rewrite/view.h"

namespace tsmem {

// Whether n is a norm that updates running statistics, or may do so.
bool updates_statistics(const torch::jit::Node* n);

// Where TorchScript simplifies a graph it drops norms whose result nothing uses, and else it runs them. In `body`, a
// copy of `source`, other things are simplified. Gives the norms that run in the first call of `source`, and would not
// in that of `body`, a use that stays (tsmem::keep). `body_of`: what the calls in `body` run once all is installed.
void keep_unused_norms(const torch::jit::Graph& source, View& body, const BodyOf& body_of);

}  // namespace tsmem
