// Loads a TorchScript file in a program that was built without tsmem, and runs one training step.
//   load_plain MODEL.pt                                     of a rewritten model: "Unknown builtin op: tsmem::..."
//   LD_PRELOAD=/path/libtsmem_ops.so load_plain MODEL.pt    works
//   load_plain MODEL.pt /path/libtsmem_ops.so               works: opens the library itself
#include <dlfcn.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: load_plain MODEL.pt [LIBRARY.so]\n");
    return 2;
  }
  if (argc > 2 && !dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  torch::jit::Module model = torch::jit::load(argv[1]);
  const at::Tensor output = model.forward({torch::ones({4, 3, 64, 64})}).toTensor();
  output.square().mean().backward();
  int64_t gradients = 0;
  for (const at::Tensor& p : model.parameters()) gradients += p.grad().defined();
  std::printf("loaded, %ld gradients\n", static_cast<long>(gradients));
} catch (const c10::Error& error) {
  std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
