// The operators' argument `recompute`: what it means, and the one int of their schemas that says so. Files that are
// written have that int.
#pragma once
#include <cstdint>

namespace tsmem {

// off: the output is kept, and the op may leave its work to PyTorch's. keep: it is kept by the op, which may recompute
// its input. shared: it is recomputed once for users that follow one another closely in backward. each_time: it is
// recomputed by each of its users. if_cheap, of convolutions, linear layers, products and attention: recomputed where
// it is cheap (traits.h, as_cheap_layer() and its like in recompute.h say where), else off. offload:
// backward has it back from the host's memory; on the CPU it is kept.
enum class Recompute { off, keep, shared, each_time, if_cheap, offload };

struct RecomputeArgument {
  Recompute how = Recompute::off;
  int64_t site = -1;  // by which a planner tells the ops of a model apart while it tries choices; -1: none

  constexpr RecomputeArgument(Recompute how, int64_t site = -1) : how(how), site(site) {}
  // The schema's int becomes one wherever it is handed on: off, keep, shared, each_time, if_cheap and offload are 0,
  // -1, 1, 2, 3 and 4; a site that is kept is counted from -2 down, from 5 on those that are recomputed (odd numbers)
  // and those that are offloaded (even ones).
  constexpr RecomputeArgument(int64_t argument)
      : how(argument == 0                       ? Recompute::off
            : argument < 0                      ? Recompute::keep
            : argument == 1                     ? Recompute::shared
            : argument == 3                     ? Recompute::if_cheap
            : argument > 3 && argument % 2 == 0 ? Recompute::offload
                                                : Recompute::each_time),
        site(argument > 4    ? (argument - 5) / 2
             : argument < -1 ? -argument - 2
                             : -1) {}

  constexpr int64_t argument() const {
    switch (how) {
      case Recompute::off:
        return 0;
      case Recompute::keep:
        return site < 0 ? -1 : -2 - site;
      case Recompute::shared:
        return 1;
      case Recompute::each_time:
        return site < 0 ? 2 : 5 + 2 * site;
      case Recompute::if_cheap:
        return 3;
      case Recompute::offload:
        return site < 0 ? 4 : 6 + 2 * site;
    }
    return 0;
  }
  constexpr bool offered() const { return how != Recompute::off; }
  constexpr bool recomputes() const {
    return how == Recompute::shared || how == Recompute::each_time || how == Recompute::if_cheap;
  }
};

// The argument for what needs no site.
constexpr int64_t argument_of(Recompute how) { return RecomputeArgument(how).argument(); }

}  // namespace tsmem
