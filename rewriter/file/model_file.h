// Reading and writing model files: TorchScript, and programs of torch.export.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <map>
#include <memory>
#include <string>

namespace tsmem {

class NewFile;
struct ExportedProgram;

struct ModelFile {
  std::string path;
  torch::jit::Module module;
  std::map<std::string, std::string> extra_files;  // name under extra/ -> contents; PyTorch drops them on load + save
  // What the module was made from, its regions inline (inline_regions.h); null for TorchScript.
  std::shared_ptr<const ExportedProgram> exported;
};

// Loads a TorchScript file or an archive of torch.export, told apart by what is in it. `device` may be "meta":
// structure without weights. Regions of an exported program that run in another mode are `with` blocks (mode_blocks.h).
// Throws Error(ErrorKind::input) with one sentence for: no such file, a directory, not a zip, a truncated zip, a
// state_dict or pickled nn.Module in place of TorchScript (says how to script it), an unknown custom op (names it, and
// the option ops), an archive that can't be trained.
ModelFile load_model(const std::string& path, const std::string& device = "cpu");

// A model, written in the format that it was read in to a temporary file beside `path`, synced and its directory read
// back. It can be loaded from temporary() and looked at; commit() renames it to `path`, and without that it is removed.
// An existing file is refused unless `force`. Nothing at `path` changes when anything fails (full disk, no permission).
// Throws Error(ErrorKind::input), Error(ErrorKind::request) for a file that exists. Tensors are written one by one: no
// second copy of the module is held.
class PendingModel {
 public:
  PendingModel(const ModelFile& model, const std::string& path, bool force);
  PendingModel(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
               const std::string& path, bool force);
  PendingModel(const PendingModel&) = delete;
  PendingModel& operator=(const PendingModel&) = delete;
  ~PendingModel();
  const std::string& temporary() const;
  void commit();

 private:
  std::unique_ptr<NewFile> file_;
  bool force_;
};

// The bytes of the file that PendingModel writes.
std::string bytes_of(const ModelFile& model);

// PendingModel and commit() in one.
void save_model(const torch::jit::Module& module, const std::map<std::string, std::string>& extra_files,
                const std::string& path, bool force);

}  // namespace tsmem
