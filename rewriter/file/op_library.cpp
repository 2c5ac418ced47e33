#include "rewriter/file/op_library.h"

#include <ATen/Version.h>
#include <dlfcn.h>

#include <filesystem>

#include "rewriter/error.h"

namespace tsmem {
namespace fs = std::filesystem;
namespace {

// site-packages/torch/lib of the torch in use.
fs::path torch_libraries() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&at::show_config), &info) || !info.dli_fname) return {};
  std::error_code ignored;
  return fs::weakly_canonical(info.dli_fname, ignored).parent_path();
}

// Why it can't be loaded, else "".
std::string open_library(const std::string& full) {
  try {
    if (dlopen(full.c_str(), RTLD_NOW | RTLD_GLOBAL)) return "";
  } catch (const std::exception& e) {  // a registration that fails
    return sentence(e);
  }
  std::string why = dlerror();
  return why.starts_with(full + ": ") ? why.substr(full.size() + 2) : why;
}

// Loads what a library misses, where it is one of torch's that this tool isn't linked with.
bool open_missing(const std::string& why) {
  const auto colon = why.find(": cannot open shared object file");
  if (colon == why.npos) return false;
  const auto name = why.substr(0, colon);
  // Its real one needs a Python around it; this has its name and is empty (cli/no_python.cpp).
  if (name == "libtorch_python.so") return dlopen("libtsmem_no_python.so", RTLD_NOW | RTLD_GLOBAL) != nullptr;
  return dlopen((torch_libraries() / name).c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
}

std::string open_with_needs(const fs::path& path) {
  // Without a slash dlopen would look in the system's directories instead of here.
  const auto full = fs::absolute(path).string();
  for (std::string before;;) {
    auto why = open_library(full);
    if (why.empty() || why == before || !open_missing(why)) return why;
    before = why;
  }
}

}  // namespace

void load_op_library(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) throw Error(ErrorKind::input, "There is no op library '" + path + "'.");
  if (auto why = open_with_needs(path); !why.empty())
    throw Error(ErrorKind::input, "Can't load the op library '" + path + "': " + why + ".");
}

bool load_op_package(const std::string& package) {
  if (package.empty()) return false;
  const auto folder = torch_libraries().parent_path().parent_path() / package;
  // torchvision's is _C_stable.so from 0.29 on: it keeps to the part of PyTorch's interface that stays.
  for (const auto* name : {"_C.so", "_C_stable.so"}) {
    std::error_code error;
    if (fs::is_regular_file(folder / name, error) && open_with_needs(folder / name).empty()) return true;
  }
  return false;
}

}  // namespace tsmem
