// Archives of torch.export ("model.pt2"): a program's graph as JSON, and its weights as records of plain bytes.
//
// What is read is what torch.export.save writes since torch 2.9 (torch/export/pt2_archive); what it wrote before, and
// what else is packed into such archives, is refused in one sentence.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "rewriter/file/archive.h"

namespace tsmem {

struct ExportedProgram {
  std::string path;                                       // of the archive
  std::string name;                                       // "model": what the program's records are called after
  nlohmann::json program;                                 // models/<name>.json
  std::map<std::string, std::string> casts_unknown = {};  // inline_regions.h: regions by their names, and why
};

// True for an archive of torch.export, of whatever version and kind.
bool is_exported(const Archive& archive);

// Reads the program without its weights. Throws Error(ErrorKind::input) where the archive is damaged, holds none or
// several, or one that can't be trained any more.
ExportedProgram read_exported(const std::string& path, const Archive& archive);

// What was saved with it: names below extra/, and contents.
std::map<std::string, std::string> extra_files_of(const ExportedProgram& program);

// The program as a module (exported_graph.h) with its weights on `device`. Names that share memory share it here.
torch::jit::Module module_of(const ExportedProgram& program, c10::Device device);

// Writes the archive again, its records as they are but for the graph, which is that of `rewritten`, the flags
// requires_grad, which are its parameters', and the extra files. Records are copied one by one.
void write_exported(const ExportedProgram& program, const torch::jit::Module& rewritten,
                    const std::map<std::string, std::string>& extra_files,
                    const std::function<size_t(const void*, size_t)>& write);

}  // namespace tsmem
