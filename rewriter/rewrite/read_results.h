// Who reads a tensor by its old name when an operator has overwritten it: F.relu(x, inplace=True) on a line of its own.
#pragma once
#include <map>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

// A use of what has been overwritten, in a view and in any copy that has the nodes.
struct Reader {
  Place overwriter;
  Place user;        // an operator or a call; no node: the method's own results
  size_t block = 0;  // with `of_block`: those of this block of the user
  bool of_block = false;
  size_t input = 0;
};

// By operator in place, in the order in which they run: the uses of its first argument that come after it. An operator
// has none where somebody else may see what it writes: by another name of the tensor, in code that may run without it,
// in the next round of a loop. `view`: as it was copied, no name of a value left out.
using Readers = std::vector<std::vector<Reader>>;
Readers readers_of_overwritten(const View& view);

// Uses of these tensors are uses of the operators' results, which are the same tensors. Leaves a view's meaning as it
// is, whatever has been left out of it.
void read_results(const View& view, const Readers& readers);

// Makes just these uses uses of the operators' results. False: the copy has not all of them, as calls that they are in
// were left as they are, say.
bool read_results(const View& copy, const std::vector<Reader>& readers);

}  // namespace tsmem
