// What TorchScript's own differentiation does to a model, as far as its results can be seen from outside.
#pragma once
#include <string>
#include <unordered_set>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// The aten::dropout nodes of a method's view that TorchScript differentiates by itself when the method runs with
// gradients for the third time or later: those with a differentiable operator beside them. They draw random numbers
// with p = 0 and p = 1 too, where the operator alone draws none. Not those that TorchScript moves before or behind
// others that draw, which would draw other numbers.
std::unordered_set<const Node*> differentiated_dropouts(const View& view);

// Whether other numbers than a random number generator's state depend on what is drawn for nothing, in a view that
// shows all that draws.
bool draws_beside(const View& view);

// What the groups of a rewritten method's view do that those of its original's do not, as a sentence for a refusal;
// empty where there is nothing. Our operators are in no group, so that others may come together that were apart.
std::string regrouped(const View& original, const View& rewritten);

// Makes groups of what TorchScript differentiates as one, when a graph runs with gradients for the third time or later.
void differentiate(std::shared_ptr<Graph>& graph);

}  // namespace tsmem
