// Putting matches into a copy of a method's graph.
#pragma once
#include <set>
#include <unordered_set>

#include "rewriter/rewrite/match.h"

namespace tsmem {

// The `recompute` argument of an op of ours that is put into a graph, at its insert point.
using RecomputeValue = std::function<Value*(Graph&, const std::string& op, const FoundMatch&)>;

// Whether an op of ours ("tsmem::add") can offer its output to be recomputed: it has an argument `recompute`. An
// expensive one (ops/traits.h) is only recomputed where a plan says so.
enum class Offers { nothing, cheap, expensive };
Offers offers_recompute(const std::string& op);

// Whether an op of ours has an argument of that name.
bool takes(const std::string& op, const std::string& argument);

// The matches of a module class's method in its own view; null where it is not rewritten.
using MatchesOf = std::function<const std::vector<FoundMatch>*(const c10::ClassType*, const std::string& method)>;

// What of a view is applied in the method's own body.
struct Choice {
  std::vector<const FoundMatch*> matches;
  std::unordered_set<const Scope*> inlined;  // calls and branches to be inlined
};

// Which of `allowed`, of all matches in a method's view, are to be applied in this method: all that no callee's own
// method has (they cross a call, or are legal only because of what the caller passes), and those in the calls that
// these inline. A call is inlined too where its callee's own method has a match that this view has not: one that is
// illegal for what this caller does, or whose result it does not use; what is left out there (it is not in
// `allowed_of`) is no reason to. Functions are shared with the kept originals and never rewritten in place. `copied`:
// places of the view, those of code that is never run included. `inlined`: calls and branches that are inlined in any
// case.
Choice choose_matches(const std::vector<FoundMatch>& allowed, const std::vector<FoundMatch>& all,
                      const std::set<std::pair<const Scope*, Node*>>& copied,
                      const std::unordered_set<const Scope*>& inlined, const Scopes& scopes,
                      const MatchesOf& matches_of, const MatchesOf& allowed_of);

// The body of `source` with the matches applied: calls and branches that a match crosses, and those that the choice
// names, are inlined, the rest stays as it was. `dead`: the calls and branches in which tensors are made that are never
// used (remove_dead_code); they are inlined, and what is unused in them left out, only where an inner value of a match
// has such a user. `passes_on`: dropouts that are left out, as they give their argument. Throws std::logic_error where
// an op's schema does not take what the rule gives it (a bug in a pattern). Null where code that the view shows to be
// dead can't be told from what runs, as calls lie around it: with all of them inlined it can. The places of what the
// matches put in are not in the result.
std::optional<View> apply_matches(const Graph& source, Scopes& scopes, const Choice& choice,
                                  const std::set<std::pair<const Scope*, Node*>>& passes_on,
                                  const std::unordered_set<const Scope*>& dead, const RecomputeValue& recompute);

}  // namespace tsmem
