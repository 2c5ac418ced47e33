// Uses of a tensor after an operator has overwritten it.
#pragma once
#include "rewriter/rewrite/view.h"

namespace tsmem {

// What reads a tensor after an operator has overwritten it reads that operator's result, which is the same tensor: as
// if F.relu(x, inplace=True) were x = F.relu(x, inplace=True). Leaves alone what may run without the operator.
void read_results(Node* in_place);
void read_results(Block* block);

}  // namespace tsmem
