// Finding patterns in a view. Changes nothing; what almost matched is data too.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "patterns/pattern.h"
#include "rewriter/rewrite/operators.h"
#include "rewriter/rewrite/read_results.h"

namespace tsmem {

// A value of a matched node: input or output `index` of pattern node `node`. Holds in the view and in any copy that has
// the node.
struct Operand {
  size_t node, index;
  bool output;
};

struct FoundMatch {
  const Pattern* pattern;
  const Rule* rule;
  std::vector<Place> nodes;               // in the order of the rule's lines
  std::map<std::string, Operand> values;  // every name of the rule's `match`
  std::string act;                        // of the matched activation
  std::vector<double> act_args;
  const Scope* scope;                // innermost that holds all nodes
  std::vector<Place> sources = {};   // what makes the tensors that it reads, other than attributes and arguments
  bool draws = false;                // a dropout that TorchScript differentiates by itself (autodiff.h)
  int64_t in_place = 0;              // of a matched sum or product, with operands as matched: InPlace of ops/common.h
  bool act_in_place = false;         // the matched activation overwrites its input
  bool draws_for_others = false;     // a dropout that overwrites what others use too: it is there to stay
  std::string makes_new = {};        // a dropout whose result is overwritten, by name: never its argument
  bool argument_is_seen = false;     // of such a dropout: by others too
  std::vector<Reader> readers = {};  // of what it overwrites, who then read its result
  std::string overwritten_by = {};   // what may write to what it reads: its output can't be recomputed from that
};

struct NearMiss {
  const Pattern* pattern;
  const Scope* scope;
  std::string reason;
};

struct MatchResult {
  std::vector<FoundMatch> found;
  std::vector<NearMiss> refused;
};

MatchResult find_matches(const View& view, const std::vector<const Pattern*>& patterns, const Attributes& attributes);

// Whether a node only asks for sizes of an inner value that the rule's `sizes` knows. Exported graphs ask for one size
// (sym_size), and hold no lists of sizes: there the operator of `sizes` needs an overload "dim" that gives one.
bool asks_for_sizes(const Node* n, const Rule& rule);

// The innermost scope that holds both.
const Scope* common_scope(const Scope* a, const Scope* b);

}  // namespace tsmem
