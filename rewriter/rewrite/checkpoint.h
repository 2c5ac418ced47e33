// Which calls of modules run again in backward as a whole (checkpoint), and why others can't.
#pragma once
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rewriter/rewrite/rewrite.h"
#include "rewriter/rewrite/view.h"

namespace tsmem {

// The modules that checkpoint names, without those inside others. Throws Error(ErrorKind::request) where a glob
// matches none.
std::set<std::string> checkpointed_paths(const std::vector<ModuleClass>& classes,
                                         const std::vector<std::string>& globs);

// Whether the module at `inner` is checkpointed in every instance of a class. A class has one body for all of them:
// throws Error(ErrorKind::request) where only some instances' are.
bool is_checkpointed(const std::set<std::string>& checkpointed, const ModuleClass& c, const std::string& inner);

// The module calls of a method that make something which is used outside them. TorchScript drops the other calls, but
// for what they write (a norm's counter of batches), and would not drop tsmem::checkpoint.
std::unordered_set<const Scope*> used_calls(const Graph& method, Scopes& scopes);

// Of the module calls of a method, those with an argument that something overwrites later, and what that is: they can't
// run again from it.
std::map<const Scope*, std::string> overwritten_arguments(const Graph& method, Scopes& scopes);

// Of the module calls of a method, those that draw random numbers which nothing outside them uses, and what draws them:
// TorchScript drops that operator with the rest of what is not used, and would not within tsmem::checkpoint.
std::map<const Scope*, std::string> unused_draws(const Graph& method, Scopes& scopes);

// Makes the calls that `checkpointed` chooses calls of tsmem::checkpoint; returns their places: (path relative to the
// method's module, method). `outer`: that module's path. Throws Error(ErrorKind::request) for a method that can't be
// run again.
std::vector<std::pair<std::string, std::string>> checkpoint_calls(Block* block, const std::string& outer,
                                                                  const std::function<bool(const Node*)>& checkpointed);

}  // namespace tsmem
