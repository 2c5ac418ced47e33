// Rewrites a TorchScript file from a program of one's own: the library behind the tool.
//   rewrite MODEL.pt OUT.pt
#include <torch/script.h>
#include <tsmem/session.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: rewrite MODEL.pt OUT.pt\n");
    return 2;
  }
  tsmem::Session session(argv[1]);
  const tsmem::RewriteReport report = session.rewrite({.level = tsmem::Level::regions});
  session.write(argv[2], /*replace=*/false);

  tsmem::VerifyOptions options;
  options.measure = true;
  const tsmem::VerifyResult result = session.verify({torch::jit::IValue(at::rand({2, 3, 64, 64}))}, options);
  std::printf("%zu matches; %s\n", report.matches.size(), result.verdict.c_str());
  if (!result.equal) return 1;  // and no file
  session.commit();
  std::printf("saved for backward: %ld of %ld bytes\n", static_cast<long>(result.saved_bytes[1]),
              static_cast<long>(result.saved_bytes[0]));
} catch (const tsmem::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return error.kind == tsmem::ErrorKind::request ? 2 : 3;
}
