// What a pattern is: plain data. The list of all of them, in the order in which they are tried, is all_patterns().
#pragma once
#include <string>
#include <vector>

namespace tsmem {

struct Rule {  // one thing to look for, and what to put in its place; see docs/adding-a-pattern.md
  std::string match;    // IR over canonical ops, one node a line
  std::string rewrite;  // IR of one node over the values of `match`
};

struct Pattern {
  std::string name;     // its file's, --only's, and the report's
  std::string algebra;  // one line: what is computed, and what is kept for backward
  std::string keeps;    // saved tensors before and after, for `tsmem patterns NAME`
  std::string conditions;
  bool by_default = true;  // false: used only when named by --only
  std::vector<Rule> rules;
};

const std::vector<Pattern>& all_patterns();

}  // namespace tsmem
