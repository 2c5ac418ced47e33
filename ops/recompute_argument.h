// The operators' argument `recompute`: what it means, and the one int of their schemas that says so. Files that are
// written have that int.
#pragma once
#include <cstdint>

namespace tsmem {

// off: the output is kept, and the op may leave its work to PyTorch's. keep: it is kept by the op, which may recompute
// its input. shared: it is recomputed once for users that follow one another closely in backward. each_time: it is
// recomputed by each of its users.
enum class Recompute { off, keep, shared, each_time };

struct RecomputeArgument {
  Recompute how = Recompute::off;
  int64_t site = -1;  // by which a planner tells the ops of a model apart while it tries choices; -1: none

  constexpr RecomputeArgument(Recompute how, int64_t site = -1) : how(how), site(site) {}
  // The schema's int becomes one wherever it is handed on: off, keep and shared are 0, -1 and 1; a site is counted from
  // 2 on, negative where it is kept.
  constexpr RecomputeArgument(int64_t argument)
      : how(argument == 0   ? Recompute::off
            : argument < 0  ? Recompute::keep
            : argument == 1 ? Recompute::shared
                            : Recompute::each_time),
        site(argument > 1    ? argument - 2
             : argument < -1 ? -argument - 2
                             : -1) {}

  constexpr int64_t argument() const {
    const int64_t counted = site < 0 ? 0 : site;
    switch (how) {
      case Recompute::off:
        return 0;
      case Recompute::keep:
        return site < 0 ? -1 : -2 - counted;
      case Recompute::shared:
        return 1;
      case Recompute::each_time:
        return 2 + counted;
    }
    return 0;
  }
  constexpr bool offered() const { return how != Recompute::off; }
  constexpr bool recomputes() const { return how == Recompute::shared || how == Recompute::each_time; }
};

// The argument for what needs no site.
constexpr int64_t argument_of(Recompute how) { return RecomputeArgument(how).argument(); }

}  // namespace tsmem
