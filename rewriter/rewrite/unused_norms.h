// Norms whose result nothing uses, and which update their running statistics all the same.
//
// Eager PyTorch runs them. TorchScript drops them where it simplifies a graph, in some calls and not in others: what
// else there is to simplify around them, and what it differentiates together with them, decides. A rewritten model runs
// what its original runs.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <set>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// A node, and the calls of functions around it within a method, from the inside.
using WayInMethod = std::vector<const torch::jit::Node*>;
WayInMethod way_in_method(const Place& place);

// Those of all methods whose result changes nothing that a caller sees, and which TorchScript runs in every call all
// the same. Some that a caller does see may be among them (observed.h).
std::set<WayInMethod> lasting_unused_norms(const torch::jit::Module& module);

// Puts our operators, which TorchScript does not drop, for these norms in `body`, a copy of `source`, and for those
// that run in the first call of `source` and would not in that of `body`. Those that would run in that of `body` alone
// are left out. `body_of`: what the calls in `body` run once all is installed. Whether there was one of these.
bool put_unused_norms(const Graph& source, View& body, const BodyOf& body_of, const std::set<WayInMethod>& lasting);

// A copy of a method's graph for which that is done, where nothing else of the method changes; nothing where there is
// none of these in it. `around_unused`: the calls around norms that nothing uses.
std::optional<View> with_unused_norms(const Graph& source, Scopes& scopes,
                                      const std::unordered_set<const Scope*>& around_unused, const BodyOf& body_of,
                                      const std::set<WayInMethod>& lasting);

}  // namespace tsmem
