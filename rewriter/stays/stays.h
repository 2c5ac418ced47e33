// Why backward still needs what it needs, in words.
#pragma once
#include "rewriter/stays/saved_tensors.h"
#include "tsmem/rewrite.h"

namespace tsmem {

// Groups saved tensors by maker and keeper, largest first, and says of each group why it stays. `refused`: what almost
// matched.
std::vector<Stay> stays_of(const std::vector<SavedTensor>& saved, const RewriteOptions& options,
                           const std::vector<Refusal>& refused);

}  // namespace tsmem
