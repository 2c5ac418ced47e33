#include "rewriter/measure/profile.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"

namespace tsmem {
namespace {

using torch::jit::Module;

// More threads than the machine has free only wait for each other on tensors this small.
struct OneThread : ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const one_thread = ::testing::AddGlobalTestEnvironment(new OneThread);

std::pair<std::string, std::optional<ErrorKind>> failure(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return {e.what(), e.kind};
  }
  return {};
}

// Modules from Python have this attribute.
Module flagged(const char* name) {
  Module m(name);
  m.register_attribute("training", c10::BoolType::get(), true);
  return m;
}

Module conv(int64_t in, int64_t out) {
  auto m = flagged("Conv");
  m.register_parameter("weight", at::randn({out, in, 3, 3}) * 0.1, false);
  m.register_parameter("bias", at::zeros({out}), false);
  m.define("def forward(self, x):\n  return torch.conv2d(x, self.weight, self.bias, padding=[1, 1])\n");
  for (const auto& p : m.parameters()) p.set_requires_grad(true);
  return m;
}

Module norm(int64_t n) {
  auto m = flagged("Norm");
  m.register_parameter("weight", at::ones({n}), false);
  m.register_parameter("bias", at::zeros({n}), false);
  m.register_buffer("running_mean", at::zeros({n}));
  m.register_buffer("running_var", at::ones({n}));
  m.register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  m.define(R"(
def forward(self, x):
  if self.training:
    self.num_batches_tracked.add_(1)
  return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-5, False)
)");
  for (const auto& p : m.parameters()) p.set_requires_grad(true);
  return m;
}

// A residual block in a stage, two stages with submodules of the same names.
Module net() {
  auto stage = [](int64_t n) {
    auto m = flagged("Stage");
    m.register_module("conv", conv(n, n));
    m.register_module("norm", norm(n));
    m.define("def forward(self, x):\n  return torch.relu(self.norm.forward(self.conv.forward(x)) + x)\n");
    return m;
  };
  auto m = flagged("Net"), holder = flagged("Holder");
  holder.register_module("conv", conv(4, 4));
  holder.define("def forward(self, x):\n  return x\n");
  m.register_module("stem", conv(3, 4));
  m.register_module("one", stage(4));
  m.register_module("two", stage(4));
  m.register_module("held", holder);
  m.define(
      "def forward(self, x):\n  x = self.two.forward(self.one.forward(self.stem.forward(x)))\n  return "
      "self.held.conv.forward(x)\n");
  return m;
}

// Counts by itself, with nothing of the recorder's.
struct Counter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    live += bytes;
    peak = std::max(peak, live);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live = 0, peak = 0;
};

struct Counted {
  int64_t after_forward, peak, output;
};

// The fourth step of a copy, counted as the recorder's contract says: gradients exist before, and the output is
// subtracted.
Counted count(Module m, const at::Tensor& x) {
  auto random = at::Tensor();
  for (const auto& p : m.parameters()) p.mutable_grad() = at::zeros_like(p);
  for (int i = 0;; ++i) {
    auto counter = std::make_shared<Counter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    auto y = m.forward({x}).toTensor();
    auto live = counter->live;
    if (i == 0) random = at::ones_like(y);
    torch::autograd::backward({y}, {random});
    if (i == 3) return {live, counter->peak, static_cast<int64_t>(y.storage().nbytes())};
  }
}

TEST(Memory, TotalsAgreeWithAnIndependentCount) {
  auto x = at::randn({2, 3, 16, 16});
  at::manual_seed(1);
  auto a = net();
  at::manual_seed(1);
  auto counted = count(net(), x);
  auto p = profile(a, {x}, {});
  EXPECT_EQ(p.saved_bytes, counted.after_forward - counted.output);
  EXPECT_EQ(p.peak_bytes, counted.peak);
  EXPECT_EQ(p.input_bytes, x.numel() * 4);
  EXPECT_GT(p.saved_bytes, 0);
  EXPECT_GE(p.peak_bytes, p.saved_bytes);
}

TEST(Memory, KnownSizes) {
  // Of two convolutions in a row only what is between them is saved: inputs and outputs do not count.
  auto m = flagged("Two");
  m.register_module("a", conv(3, 8));
  m.register_module("b", conv(8, 5));
  m.define("def forward(self, x):\n  return self.b.forward(self.a.forward(x))\n");
  auto p = profile(m, {at::randn({2, 3, 10, 10})}, {});
  EXPECT_EQ(p.saved_bytes, 2 * 8 * 10 * 10 * 4);
  EXPECT_EQ(p.parameter_bytes, (8 * 3 * 9 + 8 + 5 * 8 * 9 + 5) * 4);
  ASSERT_EQ(p.modules.size(), 3u);
  EXPECT_EQ(p.modules[0].path, "");
  EXPECT_EQ(p.modules[1].path, "a");
  EXPECT_EQ(p.modules[1].saved_bytes, p.saved_bytes);
  EXPECT_EQ(p.modules[2].saved_bytes, 0);
  ASSERT_EQ(p.ops.size(), 1u);
  EXPECT_EQ(p.ops[0].op, "aten::conv2d");
  EXPECT_EQ(p.ops[0].count, 1);
}

TEST(Memory, ModulesSumUpToTheTotals) {
  auto m = net();
  auto p = profile(m, {at::randn({2, 3, 16, 16})}, {});
  int64_t saved = 0, forward = 0, backward = 0, ops = 0, f = 0, b = 0;
  for (auto& row : p.modules) {
    saved += row.saved_bytes;
    forward += row.forward_bytes;
    backward += row.backward_bytes;
  }
  for (auto& op : p.ops) ops += op.saved_bytes;
  for (auto& e : p.timeline)
    if (e.bytes > 0) (e.backward ? b : f) += e.bytes;
  EXPECT_EQ(saved, p.saved_bytes);
  EXPECT_EQ(ops, p.saved_bytes);
  EXPECT_EQ(forward, f);
  EXPECT_EQ(backward, b);
}

TEST(Memory, ModulesOfTheSameNameAreToldApart) {
  auto m = net();
  auto p = profile(m, {at::randn({2, 3, 16, 16})}, {});
  std::map<std::string, ModuleMemory> rows;
  for (auto& row : p.modules) rows[row.path] = row;
  int64_t map = 2 * 4 * 16 * 16 * 4;
  for (std::string path : {"stem", "one.conv", "two.conv"}) {
    EXPECT_GE(rows[path].saved_bytes, map) << path;  // the input of what follows
    EXPECT_GT(rows[path].backward_bytes, 0) << path;
  }
  EXPECT_EQ(rows["one.conv"].saved_bytes, rows["two.conv"].saved_bytes);
  EXPECT_EQ(rows["held.conv"].saved_bytes, 0);  // it makes the output
  EXPECT_GT(rows["held.conv"].forward_bytes, 0);
  EXPECT_EQ(rows["held"].forward_bytes, 0);
  EXPECT_EQ(rows["one.norm"].type, "Norm");
  EXPECT_GT(rows["one.norm"].backward_bytes, 0);
}

TEST(Memory, TimelineRunsUpToThePeak) {
  auto m = net();
  auto p = profile(m, {at::randn({2, 3, 16, 16})}, {});
  int64_t live = 0, peak = 0, at_end_of_forward = 0;
  double t = 0;
  bool backward = false;
  for (auto& e : p.timeline) {
    if (e.backward && !backward) at_end_of_forward = live;
    EXPECT_TRUE(e.backward || !backward);
    EXPECT_GE(e.t, t);
    t = e.t;
    backward = e.backward;
    live += e.bytes;
    peak = std::max(peak, live);
  }
  EXPECT_TRUE(backward);
  EXPECT_EQ(peak, p.peak_bytes);
  EXPECT_EQ(at_end_of_forward, p.saved_bytes + 2 * 4 * 16 * 16 * 4);  // and the output
}

TEST(Memory, EverythingIsPutBack) {
  auto m = net();
  m.eval();
  m.attr("one").toModule().attr("norm").toModule().train(true);
  auto weight = m.attr("stem").toModule().attr("weight").toTensor();
  auto mean = m.attr("one").toModule().attr("norm").toModule().attr("running_mean").toTensor();
  auto tracked = m.attr("one").toModule().attr("norm").toModule().attr("num_batches_tracked").toTensor();
  weight.mutable_grad() = at::full_like(weight, 3);
  auto old = weight.detach().clone();
  at::manual_seed(5);
  auto expected = at::rand({3});
  at::manual_seed(5);
  profile(m, {at::randn({2, 3, 8, 8}, at::detail::getDefaultCPUGenerator().clone())}, {});
  EXPECT_TRUE(at::rand({3}).equal(expected));
  EXPECT_TRUE(weight.grad().equal(at::full_like(weight, 3)));
  EXPECT_TRUE(weight.equal(old));
  EXPECT_TRUE(mean.equal(at::zeros({4})));
  EXPECT_EQ(tracked.item<int64_t>(), 0);
  EXPECT_FALSE(m.is_training());
  EXPECT_TRUE(m.attr("one").toModule().attr("norm").toModule().is_training());
  EXPECT_FALSE(m.attr("two").toModule().attr("norm").toModule().is_training());
  EXPECT_FALSE(m.attr("stem").toModule().attr("bias").toTensor().grad().defined());
}

TEST(Memory, EvalModeAndDtypes) {
  auto m = net();
  ProfileOptions eval;
  eval.train = false;
  auto x = at::randn({2, 3, 16, 16});
  auto p = profile(m, {x}, eval);
  EXPECT_GT(p.saved_bytes, 0);
  EXPECT_TRUE(p.has_backward);
  auto half = net();
  for (const auto& t : half.named_parameters())
    if (t.name.find("norm") == std::string::npos) t.value.set_data(t.value.to(at::kBFloat16));
  EXPECT_LT(profile(half, {x.to(at::kBFloat16)}, {}).saved_bytes,
            0.7 * static_cast<double>(profile(m, {x}, {}).saved_bytes));
}

TEST(Memory, FrozenModelHasNoBackward) {
  auto m = net();
  for (const auto& p : m.parameters()) p.set_requires_grad(false);
  auto x = at::randn({2, 3, 16, 16});
  auto p = profile(m, {x}, {});
  EXPECT_FALSE(p.has_backward);
  EXPECT_EQ(p.saved_bytes, 0);
  ProfileOptions grad;
  grad.input_grad = true;
  p = profile(m, {x}, grad);
  EXPECT_TRUE(p.has_backward);
  EXPECT_GT(p.saved_bytes, 0);
  EXPECT_FALSE(x.requires_grad());
}

TEST(Memory, TimesAreMediansOfSteps) {
  auto m = net();
  ProfileOptions o;
  std::vector<std::string> told;
  o.progress = [&](const std::string& s) { told.push_back(s); };
  auto p = profile(m, {at::randn({1, 3, 8, 8})}, o);
  EXPECT_GT(p.forward_seconds, 0);
  EXPECT_GT(p.backward_seconds, 0);
  EXPECT_GE(p.step_seconds, std::max(p.forward_seconds, p.backward_seconds));
  EXPECT_GE(told.size(), 9u);  // 3 to warm up, 1 recorded, 5 timed
  o.timing = false;
  EXPECT_EQ(profile(m, {at::randn({1, 3, 8, 8})}, o).step_seconds, 0);
}

TEST(Memory, OutputsInContainersAndOtherMethods) {
  auto m = flagged("Many");
  m.register_parameter("w", at::ones({4}), false);
  m.attr("w").toTensor().set_requires_grad(true);
  m.define(R"(
def forward(self, xs: List[Tensor]):
  return xs[0]
def encode(self, xs: List[Tensor], n: int = 2):
  return {"a": xs[0] * self.w * n, "b": xs[1] * self.w}, torch.ones([3], dtype=4)
)");
  ProfileOptions o;
  o.method = "encode";
  auto p = profile(m, {c10::ivalue::Tuple::create(at::ones({4}), at::ones({4}))}, o);
  EXPECT_TRUE(p.has_backward);
}

TEST(Memory, InputsChangedInPlaceStayAsTheyWere) {
  auto m = flagged("InPlace");
  m.register_parameter("w", at::ones({4}), false);
  m.attr("w").toTensor().set_requires_grad(true);
  m.define("def forward(self, x):\n  x.add_(1)\n  return x * self.w\n");
  auto x = at::zeros({4});
  profile(m, {x}, {});
  EXPECT_TRUE(x.equal(at::zeros({4})));
}

TEST(Memory, OneSentenceForWhatCanNotRun) {
  auto m = flagged("Bad");
  m.define(R"(
def forward(self, x):
  assert x.size(0) == 2, "wants two rows"
  return x
def ints(self, x):
  return torch.ones([2], dtype=4)
)");
  auto [text, code] = failure([&] { profile(m, {at::ones({3})}, {}); });
  EXPECT_EQ(code, ErrorKind::input);
  EXPECT_NE(text.find("forward fails with these inputs"), std::string::npos) << text;
  EXPECT_NE(text.find("wants two rows"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos);
  ProfileOptions o;
  o.method = "ints";
  std::tie(text, code) = failure([&] { profile(m, {at::ones({3})}, o); });
  EXPECT_EQ(code, ErrorKind::input);
  EXPECT_NE(text.find("no floating-point tensor"), std::string::npos) << text;
  o.method = "nothing";
  EXPECT_EQ(failure([&] { profile(m, {at::ones({3})}, o); }).second, ErrorKind::request);
  EXPECT_EQ(failure([&] { profile(m, {}, {}); }).second, ErrorKind::input);
  auto n = net();
  std::tie(text, code) = failure([&] { profile(n, {at::ones({2, 5, 4, 4})}, {}); });
  EXPECT_EQ(code, ErrorKind::input);
  EXPECT_NE(text.find("channels"), std::string::npos) << text;
}

TEST(Memory, Json) {
  auto m = net();
  auto j = to_json(profile(m, {at::randn({1, 3, 8, 8})}, {}));
  for (auto key : {"input_bytes", "parameter_bytes", "saved_bytes", "peak_bytes", "forward_seconds", "backward_seconds",
                   "step_seconds", "modules", "timeline"})
    EXPECT_TRUE(j.contains(key)) << key;
  for (auto key : {"path", "type", "saved_bytes", "forward_bytes", "backward_bytes"})
    EXPECT_TRUE(j["modules"][0].contains(key)) << key;
  for (auto key : {"t", "phase", "module", "op", "bytes"}) EXPECT_TRUE(j["timeline"][0].contains(key)) << key;
  EXPECT_EQ(j["timeline"].front()["phase"], "forward");
  EXPECT_EQ(j["timeline"].back()["phase"], "backward");
}

}  // namespace
}  // namespace tsmem
