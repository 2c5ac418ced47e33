// Regions that run in another mode as TorchScript's `with` blocks.
#pragma once
#include "rewriter/graph/exported_program.h"

namespace tsmem {

// Who runs the module: TorchScript, wherever it is loaded (tsmem import), or the program that is written back, with
// eager PyTorch's autocast.
enum class RunBy { torchscript, program };

// The module of a program whose regions are inline (inline_regions.h, exported_graph.h), with a `with` block for each.
// A node that is part of one stands for the border.
torch::jit::Module module_with_blocks(const ExportedProgram& inlined, c10::Device device, RunBy by);

}  // namespace tsmem
