// Why backward still needs what it needs, in words.
#pragma once
#include "rewriter/stays/saved_tensors.h"
#include "tsmem/rewrite.h"

namespace tsmem {

// Groups saved tensors by maker and keeper, largest first, and says of each group why it stays. `report`: what
// matched, and what almost did.
std::vector<Stay> stays_of(const std::vector<SavedTensor>& saved, const RewriteOptions& options,
                           const RewriteReport& report);

}  // namespace tsmem
