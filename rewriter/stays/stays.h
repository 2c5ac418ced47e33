// Why backward still needs what it needs, in words.
#pragma once
#include "rewriter/stays/kept_tensors.h"
#include "tsmem/rewrite.h"

namespace tsmem {

// Groups what is kept by maker and keeper, largest first, and says of each group why it stays. `refused`: what almost
// matched.
std::vector<Stay> stays_of(const std::vector<KeptTensor>& kept, const RewriteOptions& options,
                           const std::vector<Refusal>& refused);

}  // namespace tsmem
