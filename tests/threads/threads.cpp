// Forward and backward from several threads at once, against what one thread gives: tsmem_threads FOLDER ROUNDS
//
// FOLDER is written by write_models.py. Prints a line a scenario; exit code 1 where numbers differ or an exception
// comes. Built with -fsanitize=thread (make tsan) it is what shows races.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "journal.h"

namespace {

using at::Tensor;
using torch::jit::Module;
using Tensors = std::vector<Tensor>;

constexpr int kThreads = 4;

Tensors parameters(const Module& m) {
  Tensors all;
  for (const Tensor& p : m.parameters()) all.push_back(p);
  return all;
}

// A module with buffers of its own, and the parameters of m.
Module with_parameters_of(const Module& m) {
  Module own = m.deepcopy();
  std::vector<Module> from, to;
  for (const Module& s : m.modules()) from.push_back(s);
  for (const Module& s : own.modules()) to.push_back(s);
  for (size_t i = 0; i < from.size(); ++i)
    for (const auto& p : from[i].named_parameters(/*recurse=*/false)) to[i].setattr(p.name, p.value);
  return own;
}

Tensor forward(Module m, const Tensor& x) { return m.forward({x}).toTensor(); }

// A loss's gradients; which = 0, 1, …: different losses of one output.
Tensor loss_of(const Tensor& out, int which) {
  const Tensor weights = at::arange(out.numel(), out.options()).mul(0.37 + which).cos().view(out.sizes());
  return (out * weights).sum();
}
Tensors gradients(const Tensor& loss, const Tensors& leaves, bool retain = false) {
  return torch::autograd::grad({loss}, leaves, {}, retain, /*create_graph=*/false, /*allow_unused=*/false);
}

void check(const Tensors& actual, const Tensors& expected, const char* what) {
  TORCH_CHECK(actual.size() == expected.size(), what);
  for (size_t i = 0; i < actual.size(); ++i)
    TORCH_CHECK(at::allclose(actual[i], expected[i], 1e-9, 1e-9), what, ": tensor ", i, " is off by ",
                (actual[i] - expected[i]).abs().max().item<double>());
}

// f(0), …, f(n - 1), each on a thread of its own, begun together. Throws the first exception.
void at_once(int n, const std::function<void(int)>& f) {
  std::promise<void> begin;
  const std::shared_future<void> go = begin.get_future().share();
  std::vector<std::future<void>> done;
  for (int i = 0; i < n; ++i)
    done.push_back(std::async(std::launch::async, [&f, go, i] {
      go.wait();
      f(i);
    }));
  begin.set_value();
  std::exception_ptr error;
  for (auto& d : done) {
    try {
      d.get();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

struct Model {
  std::string name;
  Module module;
  Tensors leaves;
  Tensor out, evaluated;  // of the input, in training and in evaluation
  Tensors grads[2];       // by loss
};

Model load(const std::string& folder, const std::string& name, const Tensor& x) {
  Model m{name, torch::jit::load(folder + "/" + name + ".pt"), {}, {}, {}, {}};
  m.leaves = parameters(m.module);
  Module own = with_parameters_of(m.module);
  for (int i = 0; i < 4; ++i) {  // TorchScript profiles and compiles first
    m.out = forward(own, x);
    for (int which : {0, 1}) m.grads[which] = gradients(loss_of(m.out, which), m.leaves, which == 0);
  }
  m.out = m.out.detach();
  m.module.eval();
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 4; ++i) m.evaluated = forward(m.module, x);
  m.module.train();
  return m;
}

// Each thread trains an instance of its own; all share their parameters; neighbours run different models.
void instances(const std::vector<Model>& models, const Tensor& x, int rounds) {
  at_once(kThreads, [&](int t) {
    for (int r = 0; r < rounds; ++r) {
      const Model& m = models[(t + r) % models.size()];
      const Module own = with_parameters_of(m.module);
      const Tensor out = forward(own, x);
      check({out}, {m.out}, "output");
      check(gradients(loss_of(out, t % 2), m.leaves), m.grads[t % 2], "gradient");
    }
  });
}

// One module in eval mode under no_grad on all threads, while its parameters are trained elsewhere.
void evaluation(const Model& m, const Tensor& x, int rounds) {
  Module shared = with_parameters_of(m.module);
  shared.eval();
  at_once(kThreads, [&](int t) {
    for (int r = 0; r < rounds; ++r) {
      if (t == 0) {
        check(gradients(loss_of(forward(with_parameters_of(m.module), x), 0), m.leaves), m.grads[0], "gradient");
      } else {
        const at::NoGradGuard no_grad;
        check({forward(shared, x)}, {m.evaluated}, "evaluation");
      }
    }
  });
}

// Forward on one thread, backward on another, the next forward meanwhile.
void elsewhere(const Model& m, const Tensor& x, int rounds) {
  const Module own = with_parameters_of(m.module);
  std::future<void> before;
  for (int r = 0; r < rounds; ++r) {
    Tensor loss = loss_of(forward(own, x), r % 2);
    if (before.valid()) before.get();
    before = std::async(std::launch::async, [&m, r, loss = std::move(loss)] {
      check(gradients(loss, m.leaves), m.grads[r % 2], "gradient");
    });
  }
  before.get();
}

// Losses of one trunk, each differentiated on its own thread, twice; some are dropped undifferentiated.
void trunk(const Model& m, const Tensor& x, int rounds) {
  const Module own = with_parameters_of(m.module);
  for (int r = 0; r < rounds; ++r) {
    Tensors losses;
    const Tensor out = forward(own, x);
    for (int t = 0; t < kThreads; ++t) losses.push_back(loss_of(out, t % 2));
    at_once(kThreads, [&](int t) {
      const Tensor loss = std::exchange(losses[t], Tensor());
      if (t == kThreads - 1) return;
      for (int i = 0; i < 2; ++i) check(gradients(loss, m.leaves, /*retain=*/true), m.grads[t % 2], "gradient");
    });
  }
}

// Gradients of all threads added up in the parameters.
void accumulation(const Model& m, const Tensor& x, int rounds) {
  for (const Tensor& p : m.leaves) p.mutable_grad() = Tensor();
  at_once(kThreads, [&](int) {
    const Module own = with_parameters_of(m.module);
    for (int r = 0; r < rounds; ++r) torch::autograd::backward({loss_of(forward(own, x), 0)}, {});
  });
  Tensors actual, expected;
  for (size_t i = 0; i < m.leaves.size(); ++i) {
    actual.push_back(m.leaves[i].grad());
    expected.push_back(m.grads[0][i] * (kThreads * rounds));
    m.leaves[i].mutable_grad() = Tensor();
  }
  check(actual, expected, "sum of gradients");
}

// Graphs are built and dropped while others run backward.
void dropped(const Model& m, const Tensor& x, int rounds) {
  at_once(kThreads, [&](int t) {
    const Module own = with_parameters_of(m.module);
    for (int r = 0; r < rounds; ++r) {
      const Tensor loss = loss_of(forward(own, x), 0);
      if (t % 2) check(gradients(loss, m.leaves), m.grads[0], "gradient");
    }
  });
}

// Draws of several threads interleave, but what each one's backward draws again is what its forward drew.
void dropout(int rounds) {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tsmem::dropout", "effect")
                      .typed<Tensor(const Tensor&, double, bool, bool, int64_t)>();
  at_once(kThreads, [&](int) {
    for (int r = 0; r < 4 * rounds; ++r) {
      const Tensor ones = at::ones({64, 1024}).requires_grad_();
      const Tensor y = op.call(ones, 0.3, true, false, 1);
      check(gradients(y.sum(), {ones}), {y.detach()}, "noise");
    }
  });
}

// One thread notes what a planner is told of its step, while others train: of theirs it is told nothing.
void planned(const Model& m, const Tensor& x, int rounds) {
  at_once(kThreads, [&](int t) {
    const Module own = with_parameters_of(m.module);
    std::array<size_t, 3> first{};
    for (int r = 0; r < rounds; ++r) {
      tsmem::Journal journal;
      size_t marks = 0;
      journal.mark = [&](int, bool) { ++marks; };
      std::optional<tsmem::JournalGuard> guard;
      if (t == 0) guard.emplace(journal);
      const Tensor out = forward(own, x);
      journal.closed = true;
      check(gradients(loss_of(out, 0), m.leaves), m.grads[0], "gradient");
      guard.reset();
      const std::array<size_t, 3> told{journal.values.size(), journal.uses.size(), marks};
      if (r == 0) first = told;
      TORCH_CHECK(told == first && (told[0] > 0) == (t == 0), "the planner was told of another thread's step");
    }
  });
}

Tensor read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::jit::pickle_load(bytes).toTensor();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: tsmem_threads FOLDER ROUNDS\n"), 2;
  const std::string folder = argv[1];
  const int rounds = std::atoi(argv[2]);
  const Tensor x = read(folder + "/input.pt");
  int failed = 0;
  const auto scenario = [&](const std::string& name, const std::function<void()>& f) {
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    try {
      f();
    } catch (const std::exception& e) {
      std::printf("  FAILED: %s\n", e.what());
      ++failed;
    }
  };
  for (const int threads : {1, 2}) {  // of an operator
    at::set_num_threads(threads);
    std::vector<Model> models;
    for (const char* name : {"residual", "transformer", "checkpoint", "plan", "forks"})
      scenario(std::string("load ") + name, [&] { models.push_back(load(folder, name, x)); });
    scenario("instances", [&] { instances(models, x, rounds * static_cast<int>(models.size())); });
    for (const Model& m : models) {
      scenario("evaluation " + m.name, [&] { evaluation(m, x, rounds); });
      scenario("backward elsewhere " + m.name, [&] { elsewhere(m, x, 2 * rounds); });
      // A checkpoint's backward runs its method again, which changes the buffers of the module and puts them back.
      if (m.name != "checkpoint") scenario("two losses " + m.name, [&] { trunk(m, x, rounds); });
      if (m.name == "residual") scenario("planned " + m.name, [&] { planned(m, x, rounds); });
      scenario("accumulation " + m.name, [&] { accumulation(m, x, rounds); });
      scenario("dropped graphs " + m.name, [&] { dropped(m, x, rounds); });
    }
    scenario("dropout", [&] { dropout(rounds); });
  }
  std::printf(failed ? "%d scenarios failed\n" : "all the same\n", failed);
  return failed ? 1 : 0;
}
