// Reading and writing TorchScript files.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <map>
#include <string>

namespace tsmem {

struct ModelFile {
  std::string path;
  torch::jit::Module module;
  std::map<std::string, std::string> extra_files;  // name under extra/ -> contents; PyTorch drops them on load + save
};

// Loads a TorchScript file. `device` may be "meta": structure without weights.
// Throws Error(kBadInput) with one sentence for: no such file, a directory, not a zip, a truncated zip, a state_dict or
// pickled nn.Module in place of TorchScript (says how to script it), an unknown custom op (names it, asks for --ops).
ModelFile load_model(const std::string& path, const std::string& device = "cpu");

// Writes a module and its extra files to a temporary file beside `path`, syncs it, reads its directory back, and renames it.
// An existing file is refused unless `force`. Nothing at `path` changes when anything fails (full disk, no permission).
void save_model(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                const std::string& path, bool force);

// Writes text (JSON, SVG, HTML) as save_model writes a module; here an existing file is replaced.
void save_text(const std::string& text, const std::string& path);

// dlopens an op library (RTLD_GLOBAL), so that its ops are known. Throws Error(kBadInput).
void load_op_library(const std::string& path);

}  // namespace tsmem
