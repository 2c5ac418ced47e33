// An exported program as TorchScript that trains: what the export has written down as literals is a flag again.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

#include "rewriter/graph/exported_program.h"

namespace tsmem {

struct Imported {
  torch::jit::Module module;
  size_t flags = 0;                // operators that ask their module's `training` again
  std::vector<std::string> notes;  // sentences: what the file could not give back
};

// Of a program whose regions are inline (inline_regions.h): a module with the program's modules, each with an attribute
// `training`, its weights under their own names, and one method `forward`, which takes the program's inputs one after
// another, checks their sizes as the program does, and returns its outputs: one as itself, more as a tuple. Throws
// Error(ErrorKind::input) where TorchScript can't express the graph.
Imported import_exported(const ExportedProgram& program);

}  // namespace tsmem
