// Regions of an exported program that run in another mode (torch.no_grad, torch.enable_grad, autocast switched off),
// which torch.export writes as operators on functions and TorchScript as `with` blocks.
#pragma once
#include "rewriter/graph/exported_program.h"

namespace tsmem {

// The program with the nodes of such regions in its graph's own list, between two nodes that are their borders, in the
// calls of modules that all nodes of the region are in. Regions of other kinds are left as they are.
ExportedProgram with_regions_inline(ExportedProgram program);

// The module of such a program (exported_graph.h), with a `with` block for each region. A node that is part of one
// stands for the border.
torch::jit::Module module_with_blocks(const ExportedProgram& inlined, c10::Device device);

}  // namespace tsmem
