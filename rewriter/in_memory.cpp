#include "rewriter/in_memory.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/storage_context.h>

#include <sstream>

#include "rewriter/inputs.h"

namespace tsmem {
namespace {

using torch::jit::Module;

std::vector<at::Tensor> tensors_of(const Module& module) {
  std::vector<at::Tensor> tensors;
  for (const Module& m : module.modules())
    for (const c10::IValue& v : m._ivalue()->slots())
      if (!v.isModule())
        for (at::Tensor& t : all_tensors(v)) tensors.push_back(std::move(t));
  return tensors;
}

// In the CPU's memory, from where PyTorch's reader moves each tensor to its device.
c10::Storage copy_of(const c10::Storage& storage) {
  const at::NoGradGuard no_grad;
  const at::Tensor copy = at::empty({static_cast<int64_t>(storage.nbytes())}, at::kByte);
  if (storage.device_type() != c10::DeviceType::Meta)
    copy.copy_(at::empty({0}, at::TensorOptions(at::kByte).device(storage.device())).set_(storage));
  return copy.storage();
}

}  // namespace

Module copy_in_memory(const Module& module, const std::string& device) {
  // PyTorch's format of modules in a package: code and values as in a file, storages handed over beside them.
  std::string bytes;
  const auto write = [&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  };
  const auto storages = std::make_shared<torch::jit::DeserializationStorageContext>();
  {
    caffe2::serialize::PyTorchStreamWriter writer(write);
    // Else the reader takes the code for a version's in which gelu, div, full, linspace and logspace meant another
    // thing.
    writer.setMinVersion(caffe2::serialize::kProducedFileFormatVersion);
    torch::jit::ScriptModuleSerializer serializer(writer);
    auto& known = serializer.storage_context();
    for (const at::Tensor& t : tensors_of(module))
      if (t.has_storage() && !known.hasStorage(t.storage()))
        storages->addStorage(std::to_string(known.getOrAddStorage(t.storage())) + ".storage", copy_of(t.storage()));
    Module source = module;
    serializer.serialize_unified_format(source, 0);
    serializer.writeFiles(".data/ts_code/code/");
    writer.writeEndOfFile();
  }
  std::optional<c10::Device> where;
  if (!device.empty()) where.emplace(device);
  std::istringstream in(std::move(bytes));
  auto reader = std::make_shared<caffe2::serialize::PyTorchStreamReader>(&in);
  return torch::jit::import_ir_module(std::make_shared<torch::jit::CompilationUnit>(), std::move(reader), storages,
                                      where, "0");
}

}  // namespace tsmem
