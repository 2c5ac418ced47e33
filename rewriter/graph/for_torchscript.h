// A program as TorchScript needs it, which differentiates and simplifies by rules of its own.
#pragma once
#include "rewriter/graph/exported_program.h"

namespace tsmem {

// Of a program whose regions are inline (inline_regions.h) one that TorchScript trains with the same numbers. Operands
// of several dtypes are cast to that of the result, in which TorchScript's own derivatives hand gradients on
// (torch/csrc/jit/runtime/symbolic_script.cpp). What goes into a region without gradients, and comes out of it, is
// detached: TorchScript makes one of two operators with the same operands, whichever region they are in
// (torch/csrc/jit/passes/common_subexpression_elimination.cpp), and may take the results of what it differentiates for
// ones that need a gradient.
ExportedProgram for_torchscript(ExportedProgram program);

}  // namespace tsmem
