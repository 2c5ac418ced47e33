// What a pattern is: plain data. The built-in ones are in patterns/, one file a pattern; a user's own come from a text
// file (docs/your-own-patterns.md) or from a program.
//
// `match` is IR over canonical operators, one a line, the last line the one that the search starts from:
//     %n = batch_norm(%y, %gamma, %beta, %mean, %var, %train, %momentum, %eps, %cudnn)
//     %z = act(%n)
// Every spelling of an operator has one canonical form there (rewriter/rewrite/canonical.h): `act` is any activation,
// in place or not, and an activation's own name that one; `add` and `mul` match their operands in either order; other
// names are aten's, or qualified ones of other libraries, matched with all their arguments in order. `rewrite` is IR
// too, each line put where the line of `match` with the same first output stood. ACT stands for the matched
// activation's name and arguments, DRAWS for what rewriter/rewrite/autodiff.h says; constants and lists of constants
// are written as they are.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "tsmem/api.h"

namespace tsmem {

struct Rule {
  std::string match, rewrite;
  std::set<std::string> shared = {};  // inner values that may have other users, because `rewrite` defines them too
  std::string sizes = {};  // "%c = tsmem::op(…) -> int[]": the sizes of an inner value whose users only ask for these
  std::set<std::string> activations =
      {};  // which activations `act` stands for; empty: any. "in-place": any that overwrites its input
  std::set<std::string> intact =
      {};  // inputs that the op keeps and what it replaces does not: nothing may write to them later
  std::set<std::string> fed_by = {};  // one input must come from one of these operators or a branch, else no gain;
                                      // "kept": or those that read them keep them all
};

struct Pattern {
  std::string name;                  // its file's, the option only's, and the report's
  std::string algebra;               // one line: what is computed
  std::string keeps;                 // saved tensors, before and after
  std::string conditions;            // when it is legal and worth it, in words
  bool by_default = true;            // false: used only when the option only names it
  bool for_regions = false;          // used at the level regions only: alone it saves nothing
  bool differentiable_once = false;  // its op has no second derivatives: not for a model that differentiates itself
  std::vector<Rule> rules;
};

// The patterns of a text file, checked: the operators that they name must be known. Throws Error(ErrorKind::input) with
// file, line, column and what was expected there.
TSMEM_API std::vector<Pattern> read_patterns(const std::string& file);

// Throws Error(ErrorKind::request) for a pattern that can't be used: with a fault in its text, with the name of another
// or of a built-in one.
TSMEM_API void check_patterns(const std::vector<Pattern>& patterns);

// A sentence for each that takes what a later or built-in one would take too, or matches what another of them puts in.
TSMEM_API std::vector<std::string> pattern_overlaps(const std::vector<Pattern>& patterns);

}  // namespace tsmem
