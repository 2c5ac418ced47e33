// What is found in one method, and what is made of it. The phases of a rewrite fill it in.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rewriter/rewrite/apply.h"
#include "rewriter/rewrite/selection.h"

namespace tsmem {

// Computed for all methods before any is changed, as callers look into their callees.
struct Result {
  MatchResult matched;                                 // in the whole view
  std::set<std::pair<const Scope*, Node*>> copied;     // the places of the whole view
  std::unordered_set<const Scope*> entered;            // its calls and branches
  std::set<std::pair<const Scope*, Node*>> passes_on;  // dropouts that give their argument, and neither draw nor copy
  std::unordered_set<const Scope*> dead;               // calls and branches with unused tensors in them
  std::unordered_set<const Scope*>
      around_unused;                      // of norms that nothing uses, outside autocast blocks, and of dead draws
  std::unordered_set<const Scope*> used;  // where modules run again: used_calls()
  std::map<const Scope*, std::string> overwritten;               // where modules run again: overwritten_arguments()
  std::map<const Scope*, std::string> unused_draws;              // where modules run again: unused_draws()
  std::map<std::pair<const Scope*, Node*>, bool> draws_again;    // where modules run again: drawing_inside()
  std::set<std::string> not_used;                                // checkpointed modules whose calls are not used
  std::unordered_set<const Scope*> inlined;                      // around these calls
  std::vector<FoundMatch> allowed;                               // of the matches, what is not left out
  std::vector<FoundMatch> found;                                 // of these, what is applied in this method
  std::vector<Refusal> refused;                                  // without the module
  std::shared_ptr<Graph> body;                                   // rewritten; null where nothing was found
  std::optional<View> body_view;                                 // of the same graph
  std::vector<std::pair<std::string, std::string>> checkpoints;  // (module, method) of the calls in it that run again
};

using Results = std::map<Method, Result>;

// Calls f(class, function, result) for every method that has a result, parents first.
template <class F>
void for_each_result(const Selection& selection, Results& results, F f) {
  for (const ModuleClass& c : selection.classes)
    for (torch::jit::Function* function : std::vector<torch::jit::Function*>(c.type->methods()))
      if (auto it = results.find({c.type.get(), function->name()}); it != results.end()) f(c, *function, it->second);
}

// The matches that were found, by method.
MatchesOf matches_of(const Results& results);

// The bodies that calls run once the rewritten ones are there.
BodyOf rewritten_bodies(const Results& results);

}  // namespace tsmem
