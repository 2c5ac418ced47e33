// Rewriting a loaded module in place: match, apply, verify the structure; and undoing it.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

#include "tsmem/api.h"
#include "tsmem/error.h"
#include "tsmem/pattern.h"
#include "tsmem/saved.h"

namespace tsmem {

// ops: each operator keeps what its own backward needs. regions: outputs that are cheap to make from what is kept
// anyway (norms, activations, sums, concatenations between convolutions) are recomputed in backward.
// plan: each of these outputs, and those of convolutions, linear layers and the like, is recomputed where an attribute
// of its module says so; at first as at regions. rewriter/plan/planner.h chooses.
enum class Level { ops, regions, plan };

struct RewriteOptions {
  Level level = Level::ops;                // the tool's and Python's default is regions
  std::vector<Pattern> patterns;           // the user's own (tsmem/pattern.h), tried before the built-in ones
  std::vector<std::string> only, skip;     // pattern names; `only` also enables the patterns that are off by default
  std::vector<std::string> module_globs;   // restricts the rewrite to matching module paths; empty: everywhere
  std::vector<std::string> checkpoint;     // modules that keep their arguments alone and run again in backward
  std::vector<std::string> freeze, train;  // parameter globs whose requires_grad is cleared or set
  std::string amp;                         // "bf16", "f16": `method` (or forward) runs under autocast; empty: as it is
  std::string method;                      // empty: every method of every module; else this one and all that it calls
  // The methods are run operator by operator, as PyTorch runs eager code, and not by TorchScript, which drops what
  // nothing uses and draws where it differentiates a dropout of p = 0.
  bool runs_eagerly = false;
};

struct Match {
  std::string pattern, module, method;
  std::vector<std::string> nodes;  // the matched ops with their places, in graph order: "bn1.forward: aten::batch_norm"
  bool recomputed;                 // its output is recomputed in backward
  std::string op;                  // what was put there: "tsmem::batch_norm_act"; several joined by " + "
  std::string overwritten_by;      // what may write to its operands later, so that nothing is recomputed from them
};

// `pattern` is "checkpoint" for a module that was to run again in backward and does not.
struct Refusal {
  std::string pattern, module, reason;
  bool shared_class = false;  // the module was asked for, and others of its class were not
};

// Modules of the option checkpoint: kept and recomputed name the module's calls. Else: the outputs in one method that
// backward recomputes, and those that it recomputes them from, as Match::nodes are written.
struct Region {
  std::string module, method;
  std::vector<std::string> kept, recomputed;
  bool whole = false;  // a module of the option checkpoint
};

// An output that a plan may keep or recompute.
struct Site {
  std::string module;     // path of the instance
  std::string attribute;  // its attribute, an integer: -1 kept, 1 and 2 recomputed, 4 offloaded
  std::string op;
  bool expensive;  // a convolution, linear layer, product of matrices or attention
};

struct RewriteReport {
  std::vector<Match> matches;
  std::vector<Region> regions;
  std::vector<Refusal> refused;
  std::vector<Site> sites;  // at Level::plan
  size_t bodies = 0;        // methods that have other code than before
  Saved saved;              // what `method` (or forward) keeps for backward, by its graph
};

// Rewrites every method that has a match; keeps each original as `_tsmem_original_<method>`. A rewritten module is
// restored first. A module that has run must be loaded anew: TorchScript holds on to what it has compiled. With
// `dry_run` nothing is changed. Throws Error(ErrorKind::request) for an unknown pattern, a method or glob that matches
// nothing, and a module that can't be run again.
TSMEM_API RewriteReport rewrite(torch::jit::Module& module, const RewriteOptions& options, bool dry_run = false);

// Puts the original methods back and removes all `_tsmem_*` ones. False where there were none. Weights stay as they
// are.
TSMEM_API bool restore(torch::jit::Module& module);

TSMEM_API bool is_rewritten(const torch::jit::Module& module);

}  // namespace tsmem
