// Whether patterns can be used: what is wrong with one, and what two of them share.
#pragma once
#include "rewriter/patterns/pattern_lines.h"
#include "tsmem/pattern.h"

namespace tsmem {

// Throws PatternFault for the first thing that is wrong: unknown operators, arguments that they do not take, values
// that nothing makes, a replacement that matches again.
void check_rule(const Rule& rule);

// The inputs of `match` that `rewrite` reads, without %.
std::set<std::string> inputs_read(const Rule& rule);

// Whether one of the rules matches operators among those of the other: its `match` fits into the other's.
bool overlap(const Rule& a, const Rule& b);

}  // namespace tsmem
