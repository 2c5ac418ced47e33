// Rewritten methods in which TorchScript would differentiate together what it does not in the original, as far as that
// is seen from outside.
#pragma once
#include "rewriter/rewrite/method_result.h"

namespace tsmem {

// Where that is so of a method that no other calls, takes the matches in it and in all that it calls out of `found`,
// the results as they were before bodies were built, and says why. Whether there was one.
bool refuse_regrouped(const Results& built, Results& found);

}  // namespace tsmem
