// What was seen of one training step, as plain data, and which modules it belongs to.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rewriter/measure/profile.h"

namespace tsmem {

// The module of every op of a forward pass: op name -> module of each of its runs, where known.
using OpModules = std::map<std::string, std::vector<std::optional<std::string>>>;

struct Recording {
  // Where an allocation comes from.
  struct Origin {
    std::string module, op;
    // Where the module is a guess: the ops that run, outermost first, each by its name and how often it had run before.
    std::vector<std::pair<std::string, size_t>> ops;
  };
  struct Allocation {
    int64_t bytes;
    Origin origin;
    bool backward;
    bool alive_after_forward = false;  // and not excluded from what backward keeps
    int64_t node = -1;                 // in backward: the autograd node's sequence number
    std::string inner{};               // and the op that runs in it
    int64_t kept_by = -1;              // the node that held it last, where record_forward() let go of them in turn
  };
  struct PlacedEvent {
    Event event;
    std::optional<size_t> allocation;
  };
  struct PlacedSpan {
    Span span;
    Origin origin;
    int64_t node;  // in backward: as in Allocation
  };

  bool has_backward = true;
  std::vector<Allocation> allocations;
  std::vector<size_t> freed;              // of the allocations: alive after forward, and given back since
  std::vector<PlacedEvent> events;        // until the end of backward
  std::vector<PlacedSpan> spans;          // the same
  std::map<int64_t, Origin> by_sequence;  // autograd sequence number -> forward op
  OpModules op_modules;
  // Sequence number of a differentiated graph's node -> its forward ops. TorchScript's nodes in it have forgotten where
  // they come from, so the modules are guesses.
  std::map<int64_t, std::vector<Origin>> graphs;
};

// Puts modules in the place of guesses, from a run of the same step without differentiated graphs; and gives what
// happened in backward the modules of the forward ops that it belongs to.
void place(Recording& recording, const OpModules& known);

// The forward op that made the autograd node of a sequence number; null where none is known.
const Recording::Origin* maker_of(const Recording& recording, int64_t node);

// Moves a recording whose modules are known into a profile, whose modules are there.
void add_to(Profile& profile, Recording recording);

}  // namespace tsmem
