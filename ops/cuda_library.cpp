#include "cuda_library.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "composed/composed.h"

namespace tsmem {
namespace {

// Of the folder that this library lies in; empty where that is not known.
std::string path_beside() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<const void*>(&load_cuda_library), &self) || !self.dli_fname) return {};
  const std::string own = self.dli_fname;
  const size_t slash = own.rfind('/');
  // A name without a folder would be looked for along the library path.
  return (slash == std::string::npos ? "./" : own.substr(0, slash + 1)) + "libtsmem_ops_cuda.so";
}

// Once, also where the warning below is an error and the library is asked for again.
void compose() {
  static const auto library = [] {
    auto made =
        std::make_unique<torch::Library>(torch::Library::IMPL, "tsmem", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    composed::register_all(*made, c10::DispatchKey::CUDA);
    return made;
  }();
}

// Why the library is not loaded, which it otherwise is from here on.
std::optional<std::string> why_not() {
  const std::string path = path_beside();
  if (access(path.c_str(), F_OK) != 0) return path + " was not built";
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return dlerror();
  return std::nullopt;
}

void load() {
  if (at::detail::getCUDAHooks().hasROCM()) return compose();
  const auto why = why_not();
  if (!why) return;
  compose();
  TORCH_WARN(
      "tsmem: its kernels for CUDA are not there, so that norms and activations are made of PyTorch's operators, which "
      "takes longer: ",
      *why, ". Install tsmem again where the device is.");
}

}  // namespace

void load_cuda_library() {
  static std::once_flag once;
  std::call_once(once, load);
}

}  // namespace tsmem
