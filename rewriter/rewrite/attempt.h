// A rule ready to be searched for, and what an attempt to match it has bound.
#pragma once
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/match.h"

namespace tsmem {

struct CompiledRule {
  const Pattern* pattern;
  const Rule* rule;
  const std::vector<Line>& lines;
  std::map<std::string, size_t> defined_by;  // inner value -> line
};

struct Attempt {
  std::vector<Node*> nodes;      // by line
  std::vector<CanonicalOp> ops;  // by line
  std::map<std::string, Value*> bound;
  std::map<std::string, Operand> values;
};

}  // namespace tsmem
