// What else the rewriter offers to this library alone.
#pragma once
#include "rewriter/install.h"
#include "rewriter/modules.h"
#include "tsmem/rewrite.h"

namespace tsmem {

// The values of a site's attribute (ops/recompute.h). Made again: anew by each that needs it, which is what plans count
// on. Kept: by the same op, which may make its input again; 0 would leave some activations to stock's, which keep
// theirs.
constexpr int64_t kEachTime = 2, kKept = -1;

}  // namespace tsmem
