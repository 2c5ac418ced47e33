// The rewritten bodies: the fourth phase of a rewrite.
#pragma once
#include "rewriter/rewrite/method_result.h"

namespace tsmem {

// Makes the rewritten bodies, and at Level::plan the attributes that they read.
std::vector<Site> build_bodies(const torch::jit::Module& module, const Selection& selection, Scopes& scopes,
                               Results& results);

}  // namespace tsmem
