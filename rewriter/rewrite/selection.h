// What a rewrite was asked for, looked up in the module: the first phase.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rewriter/rewrite/match.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/text.h"

namespace tsmem {

using Method = std::pair<const c10::ClassType*, std::string>;

struct Selection {
  const RewriteOptions& options;
  std::vector<const Pattern*> patterns;
  std::vector<ModuleClass> classes;
  std::optional<std::set<Method>> wanted;  // by `method`; none: all
  std::set<std::string> checkpointed;      // paths of modules that run again as a whole
  std::set<Method> in_autocast;            // called inside an autocast block of the model's own code

  bool holds(const std::string& path) const {
    const auto& globs = options.module_globs;
    return globs.empty() || std::any_of(globs.begin(), globs.end(), [&](auto& g) { return glob_covers(g, path); });
  }
};

// The patterns that are tried, in their order; the user's own go before the built-in ones. Throws
// Error(ErrorKind::request) for a name that none has.
std::vector<const Pattern*> chosen_patterns(const RewriteOptions& options);

// Throws Error(ErrorKind::request) for a pattern, method or module that there is not.
Selection select(const torch::jit::Module& module, const RewriteOptions& options);

struct LeftOut {
  bool is;
  std::string reason;  // empty: the user has said so
  bool shared_class = false;
};

// Whether the option `module` leaves a match out, or it is called inside an autocast block of the model's own code. A
// class has one body for all its instances: all of them or none.
LeftOut leaves_out(const FoundMatch& found, const ModuleClass& c, const Method& method, const Selection& selection);

}  // namespace tsmem
