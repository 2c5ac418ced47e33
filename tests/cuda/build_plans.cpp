// Builds cuDNN's plans of fused convolutions for a device that is described, and not there.
//
//   tsmem_build_plans LIBCUDNN DESCRIPTION SM < shapes
//
// DESCRIPTION: a file with cuDNN's device properties in JSON; SM: the compute capability, as 90. A line of shapes:
// f16 or bf16, then N C H W, K R S, and stride, padding and dilation, one number each. For each line two lines come
// out, of the convolution and of its weight's gradient: "plan ENGINE WORKSPACE", or "none WHY".
#include <fstream>
#include <iostream>
#include <sstream>

#include "cuda/cudnn_plans.h"

using namespace tsmem::cuda;

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "tsmem_build_plans: wants cuDNN's library, a description of a device, and its compute capability\n";
    return 2;
  }
  if (const std::string why = load_cudnn(argv[1]); !why.empty()) {
    std::cerr << "tsmem_build_plans: " << why << '\n';
    return 1;
  }
  std::stringstream description;
  description << std::ifstream(argv[2]).rdbuf();
  const PlanFor device{nullptr, description.str(), std::stoi(argv[3])};
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::string dtype;
    int64_t n, c, h, w, k, r, s, stride, padding, dilation;
    if (!(in >> dtype >> n >> c >> h >> w >> k >> r >> s >> stride >> padding >> dilation)) {
      std::cerr << "tsmem_build_plans: no shape: " << line << '\n';
      return 1;
    }
    const auto out = [&](int64_t size, int64_t window) {
      return (size + 2 * padding - dilation * (window - 1) - 1) / stride + 1;
    };
    const FusedConv conv{dtype == "bf16" ? tsmem::Dtype::bf16 : tsmem::Dtype::f16,
                         {n, c, h, w},
                         {k, c, r, s},
                         {n, k, out(h, r), out(w, s)},
                         {stride, stride},
                         {padding, padding},
                         {dilation, dilation}};
    for (const FusedGraph graph : {FusedGraph::convolution, FusedGraph::weight_gradient}) {
      std::string why;
      if (const auto plan = build_plan(graph, conv, device, why))
        std::cout << "plan " << engine_name(*plan) << ' ' << workspace_bytes(*plan) << '\n';
      else
        std::cout << "none " << why.substr(0, why.find('\n')) << '\n';
    }
  }
}
