// What a rewritten model still saves for backward, and why, as plain data.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tsmem {

// Why backward needs a tensor of forward: what would help depends on it.
enum class Why {
  no_operator,   // tsmem has no operator for the one that keeps it
  not_replaced,  // tsmem has one for the operator that keeps it, but no pattern matches there
  expensive,     // a convolution, a linear layer, a matrix product or attention made it: plans alone recompute it
  not_offered,   // what made it is no operator of tsmem's that could recompute it
  own,           // an operator of tsmem's needs it for its own backward
  level_ops,     // Level::ops recomputes nothing
  sources,       // recomputing it would take other tensors that are gone, or as large
  overwritten,   // what it would be recomputed from may be written to before backward
  unknown,       // nothing is known of what the operator keeps
};

// Tensors that one operator of one module makes and one keeps.
struct Stay {
  std::string op, module;             // what makes them
  std::string keeper, keeper_module;  // whose backward needs them: the first one's in forward's order
  int64_t tensors = 0;                // by the graph: what runs in a loop counts once
  std::optional<int64_t> bytes;       // where they were measured
  Why why = Why::unknown;
  std::string reason;  // half a sentence
};

struct Saved {
  std::vector<Stay> stays;  // largest first; in forward's order where sizes are not known
  int64_t tensors = 0, original_tensors = 0;
  std::optional<int64_t> bytes, original_bytes;  // where they were measured
};

}  // namespace tsmem
