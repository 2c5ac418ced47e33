// What operators save for their backward.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tsmem {

struct SavedBy {
  struct Part {
    std::string argument;     // of the schema; "result" for the results
    std::string gradient_of;  // saved where this argument needs a gradient; "": wherever anything does
  };
  std::vector<Part> parts;
  bool internals = false;      // tensors that no value of a graph stands for: masks, indices, a recurrent layer's gates
  bool all_arguments = false;  // every tensor that it takes
};

// Of an operator by its qualified name, with or without the underscore of one that overwrites. Operators of tsmem's
// that are not in the table keep what they take. nullopt where nothing is known.
std::optional<SavedBy> saved_by(std::string_view op);

// The table's rows as they are written, for its test.
struct SavedByRow {
  std::string_view op, what;
};
const std::vector<SavedByRow>& saved_by_rows();

// Whether the results of an operator never need a gradient: comparisons, positions, what is cut off.
bool never_needs_gradient(std::string_view op);

}  // namespace tsmem
