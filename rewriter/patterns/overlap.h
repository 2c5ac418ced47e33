// What two patterns share.
#pragma once
#include "tsmem/pattern.h"

namespace tsmem {

// Whether one of the rules matches operators among those of the other: its `match` fits into the other's.
bool overlap(const Rule& a, const Rule& b);

// Whether a rule's `match` fits into what the other one puts.
bool matches_what_is_put(const Rule& rule, const Rule& by);

}  // namespace tsmem
