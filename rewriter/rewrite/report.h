// What a rewrite says of itself: the fifth phase.
#pragma once
#include "rewriter/rewrite/method_result.h"

namespace tsmem {

// What was done, module by module.
RewriteReport report(const torch::jit::Module& module, const Selection& selection, const Results& results);

}  // namespace tsmem
