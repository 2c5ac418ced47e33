// Whether a pattern can be used: what is wrong with one.
#pragma once
#include "rewriter/patterns/pattern_lines.h"
#include "tsmem/pattern.h"

namespace tsmem {

// Throws PatternFault for the first thing that is wrong: unknown operators, arguments that they do not take, values
// that nothing makes, a replacement that matches again.
void check_rule(const Rule& rule);

// The inputs of `match` that `rewrite` reads as tensors, without %.
std::set<std::string> tensors_read(const Rule& rule);

}  // namespace tsmem
