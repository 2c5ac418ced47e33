// The matches of every method: the second and the third phase of a rewrite.
#pragma once
#include "rewriter/rewrite/method_result.h"

namespace tsmem {

// Finds the matches of every method that was asked for.
Results match_methods(const torch::jit::Module& module, const Selection& selection, Scopes& scopes);

// Of the matches, those that are allowed, and why others are not.
void assign_matches(const Selection& selection, const Scopes& scopes, Results& results);

}  // namespace tsmem
