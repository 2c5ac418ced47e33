// Libraries of other packages that define operators: torchvision's and the user's own.
#pragma once

#include <string>

namespace tsmem {

// dlopens an op library (RTLD_GLOBAL), so that its ops are known. What it needs of torch's own libraries is found, and
// one that only names libtorch_python, as torchvision's does, needs no Python. Throws Error(ErrorKind::input).
void load_op_library(const std::string& path);

// Loads the op library of an installed Python package, `package`/_C.so beside the torch in use. False where there is
// none, or where it can't be loaded.
bool load_op_package(const std::string& package);

}  // namespace tsmem
