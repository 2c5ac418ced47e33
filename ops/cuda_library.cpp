#include "cuda_library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <mutex>
#include <string>

namespace tsmem {
namespace {

void load() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<const void*>(&load_cuda_library), &self) || !self.dli_fname) return;
  const std::string own = self.dli_fname;
  const size_t slash = own.rfind('/');
  // A name without a folder would be looked for along the library path.
  const std::string path = (slash == std::string::npos ? "./" : own.substr(0, slash + 1)) + "libtsmem_ops_cuda.so";
  if (access(path.c_str(), F_OK) != 0) return;
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
    TORCH_WARN("tsmem: the CUDA kernels can't be loaded, CUDA tensors take PyTorch's own: ", dlerror());
}

}  // namespace

void load_cuda_library() {
  static std::once_flag once;
  std::call_once(once, load);
}

}  // namespace tsmem
