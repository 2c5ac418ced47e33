// Putting matches into a method's graph. The only file that edits graphs.
#pragma once
#include "rewriter/match.h"

namespace tsmem {

// The `recompute` argument of an op of ours that is put into a graph, at its insert point.
using RecomputeArgument = std::function<Value*(Graph&, const std::string& op)>;

// The body of `source` with the matches applied: calls and branches that a match crosses are inlined, the rest stays as
// it was. Throws std::logic_error where an op's schema does not take what the rule gives it (a bug in a pattern).
std::shared_ptr<Graph> apply_matches(const Graph& source, Scopes& scopes, const std::vector<const Found*>& matches,
                                     const RecomputeArgument& recompute);

// Whether an op of ours ("tsmem::add") can offer its output to be made again: its last argument is `recompute`. A dear
// one (a convolution, a matrix product) is only made again where a plan says so.
enum class Offers { nothing, cheap, dear };
Offers offers_recompute(const std::string& op);

// Whether a method of a module class has the same match of the same nodes in its own view.
using HasMatch = std::function<bool(const c10::ClassType*, const std::string& method, const Found&)>;

// Those of `found`, all matches in a method's view, that are to be applied in this method: all that no callee's own
// method has (they cross a call, or are legal only because of what the caller passes), and those in the calls that
// these inline. Functions are shared with the kept originals and never rewritten in place.
std::vector<const Found*> matches_of_method(const std::vector<Found>& found, const HasMatch& callee_has);

}  // namespace tsmem
