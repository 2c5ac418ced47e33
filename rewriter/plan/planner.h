// Choosing what backward recomputes, so that a training step's peak fits a budget and takes as little time as possible.
//
// The module is rewritten at Level::plan: each output that backward could recompute has an attribute that says whether
// it does. A step is measured once with everything cheap recomputed and everything expensive (convolutions, products)
// kept (measurement.h), which gives a StepModel: live bytes at the backward of every node, the seconds that it takes to
// compute each value, and who needs which value when. From these a mixed-integer program chooses (choice.h); a step
// under that choice is measured, and where it needs more than was predicted, the model learns so and the program
// chooses again. What is given out was measured.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rewriter/plan/batches.h"
#include "rewriter/plan/choice.h"
#include "rewriter/rewrite/rewrite.h"
#include "tsmem/plan.h"

namespace tsmem {

class Planner {
 public:
  // `module` was rewritten at Level::plan, has `sites`, and has not run; `original` is what it was. Runs warm-up and
  // measured steps of both. Throws Error(ErrorKind::input) as TrainingStep does, Error(ErrorKind::request) for an
  // unknown method or device.
  Planner(torch::jit::Module& original, torch::jit::Module& module, std::vector<Site> sites,
          const std::vector<c10::IValue>& inputs, const PlanOptions& options);
  ~Planner();

  // The fastest choice whose peak is at most `budget` bytes. Throws Error(ErrorKind::budget) with the smallest possible
  // peak where there is none.
  PlanPoint plan(int64_t budget);

  // The choice with the smallest peak that was found.
  PlanPoint smallest();

  // `count` points from the smallest budget to `largest`, none with a higher peak than its budget, none slower than one
  // with a smaller budget.
  std::vector<PlanPoint> front(int64_t largest, int count);

  // The peak of a step under a choice at other batch sizes, which is dimension 0 of every tensor in the input that has
  // the first one's. From steps with the input and with a batch of `other`. Throws Error(ErrorKind::input) where the
  // model does not take other batch sizes.
  Batches batches(const Choice& choice, int64_t other);
  int64_t batch() const;  // of the input; throws Error(ErrorKind::input) where there is none

  struct Original {
    int64_t peak_bytes, kept_bytes;
    double seconds;  // of a step; measured in turns with the rewritten model's
  };
  Original original() const;

  double solve_seconds() const;  // spent in the solver so far
  size_t solves() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes a choice into the attributes of its sites.
void set_choice(const torch::jit::Module& module, const std::vector<Site>& sites, const Choice& choice);

}  // namespace tsmem
