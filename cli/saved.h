// What `rewrite` says of what backward still needs.
#pragma once
#include <string>

#include "tsmem/rewrite.h"

namespace tsmem::cli {

// The share that is left, what it consists of, and which options would go further. `all`: every row, not the largest.
std::string saved_text(const Saved& saved, Level level, bool all);

}  // namespace tsmem::cli
