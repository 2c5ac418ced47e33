// Loads a (rewritten) TorchScript file and trains it for a few steps on random images: nothing in here knows of tsmem.
//   train MODEL.pt [STEPS [BATCH [SIZE]]]
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/script.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: train MODEL.pt [STEPS [BATCH [SIZE]]]\n");
    return 2;
  }
  const int steps = argc > 2 ? std::atoi(argv[2]) : 5;
  const int64_t batch = argc > 3 ? std::atoll(argv[3]) : 4, size = argc > 4 ? std::atoll(argv[4]) : 64;

  torch::jit::Module model = torch::jit::load(argv[1]);
  model.train();
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : model.parameters()) {
    if (p.requires_grad()) parameters.push_back(p);
  }
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.01).momentum(0.9));

  torch::manual_seed(0);
  const at::Tensor images = torch::randn({batch, 3, size, size});
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = model.forward({images}).toTensor();
    const at::Tensor loss = torch::nn::functional::cross_entropy(output, torch::arange(batch) % output.size(1));
    loss.backward();
    optimizer.step();
    std::printf("step %d loss %.4f\n", step, loss.item<double>());
  }
} catch (const c10::Error& error) {
  std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
