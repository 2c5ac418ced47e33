// Choosing what backward recomputes and what is offloaded, from a StepModel and a budget alone: a mixed-integer linear
// program, and a greedy choice where there is no time for it.
#pragma once
#include <optional>
#include <vector>

#include "rewriter/plan/step_model.h"
#include "tsmem/plan.h"

namespace tsmem {

struct PlanChoice {
  Choice choice;
  double gap = 0;       // the choice is at most this fraction of a step slower than the best, by the model
  bool solved = false;  // by the solver; else the greedy one
};

// The choice with the least predicted seconds whose predicted peak is at most `budget` bytes. Nothing where the solver
// has proven that there is none; the greedy choice where it finds none in its time, or where the program is too large
// for it. `known`: a choice that fits, to begin with; empty: none.
std::optional<PlanChoice> fastest_choice(const StepModel& model, double budget, const Choice& known,
                                         const SolverLimits& limits);

// The choice with the smallest predicted peak. `begin`: a choice to begin with; empty: none.
std::optional<PlanChoice> smallest_choice(const StepModel& model, const Choice& begin, const SolverLimits& limits);

// Without a solver: a choice whose predicted peak is at most `budget`, or the one with the smallest peak that was
// found where none of those tried is.
Choice greedy_choice(const StepModel& model, double budget);

}  // namespace tsmem
