// From a model to a rewritten one that was compared with it: load, rewrite or plan, verify, commit.
//
//   tsmem::Session session("model.pt");
//   tsmem::RewriteReport report = session.rewrite({.level = tsmem::Level::regions});
//   session.write("model.mem.pt", /*replace=*/false);
//   if (session.verify(inputs, {}).equal) session.commit();
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tsmem/api.h"
#include "tsmem/diff.h"
#include "tsmem/error.h"
#include "tsmem/plan.h"
#include "tsmem/profile.h"
#include "tsmem/rewrite.h"
#include "tsmem/verify.h"

namespace tsmem {

struct PlannedRewrite {
  RewriteReport report;
  ChosenPlan plan;
};

// Whatever fails throws Error and leaves every existing file as it was.
class TSMEM_API Session {
 public:
  // A TorchScript file, which may be a rewritten one, or a program of torch.export.
  explicit Session(const std::string& path);
  // A copy of a module, made in memory: the module stays as it is, and the copy shares nothing with it.
  explicit Session(const torch::jit::Module& module);
  // The same, with a copy that the caller has made: it is changed in place.
  Session(const torch::jit::Module& module, torch::jit::Module working);
  Session(Session&&) noexcept;
  ~Session();

  // One of these four, once. A model that was rewritten before is restored first.
  RewriteReport rewrite(const RewriteOptions& options, bool dry_run = false);
  // Rewrites by a plan for `inputs`, on the meta device where the plan is estimated.
  PlannedRewrite plan(RewriteOptions options, const std::vector<c10::IValue>& inputs, const PlanRequest& request);
  // Every plan that is worth it, `count` points; the module is of no use afterwards.
  PlanFront front(RewriteOptions options, const std::vector<c10::IValue>& inputs, const PlanOptions& how, int count);
  // Puts the original methods back, with the weights as they are. Throws Error where there are none.
  void restore();

  // The module as it is now. Of a session that was written and not yet committed: it is gone.
  const torch::jit::Module& module() const;

  // Writes the module to a temporary file beside `path`, where it stays until commit() or the session's end. An
  // existing file is refused unless `replace`.
  void write(const std::string& path, bool replace);
  // The bytes of such a file, made in memory.
  std::string bytes() const;
  // Renames the file to its path.
  void commit();

  // The contract of a rewritten model's state: one sentence for each difference (tsmem/verify.h) between the original
  // and what was written, or the module where nothing was. What freeze and train asked for is none.
  std::vector<std::string> structure_differences(const std::string& device = "cpu");
  // Puts measured bytes into what a rewrite or plan has reported of what is saved: of a forward pass of the original
  // and of the result with these inputs, which may be on the meta device. The report stays as it is where the model
  // can't run with them.
  void measure_saved(RewriteReport& report, const std::vector<c10::IValue>& inputs, const std::string& device);
  // structure_differences(), and the numbers for `inputs`.
  VerifyResult verify(const std::vector<c10::IValue>& inputs, const VerifyOptions& options);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tsmem
