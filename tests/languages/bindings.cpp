// What a language's bindings are: C functions over LibTorch, in a library that knows nothing of tsmem. As in FTorch,
// tch, TorchSharp and gotch.
#include <torch/script.h>

#include <cstdio>
#include <exception>

// Three steps of plain gradient descent on the model in one file, written to another. 1, and a sentence, where
// something fails.
extern "C" int train(const char* file, const char* trained) try {
  torch::jit::Module model = torch::jit::load(file);
  model.train();
  const at::Tensor images = at::linspace(-1, 1, 4 * 3 * 16 * 16).view({4, 3, 16, 16});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model.forward({images}).toTensor().square().mean();
    loss.backward();
    at::NoGradGuard no_grad;
    for (at::Tensor p : model.parameters()) {
      p.sub_(p.grad(), 0.01);
      p.mutable_grad().reset();
    }
    std::printf("loss %.6f\n", loss.item<double>());
  }
  std::fflush(stdout);
  model.save(trained);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
