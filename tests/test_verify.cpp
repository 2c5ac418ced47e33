#include "rewriter/verify/verify.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "rewriter/error.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/verify/outcome.h"

namespace tsmem {
namespace {

using c10::IValue;
using torch::jit::Module;

const char* const kNet = R"(
def forward(self, x):
  y = torch.conv2d(x, self.weight, self.bias)
  y = torch.batch_norm(y, self.gamma, self.beta, self.mean, self.var, self.training, 0.1, 1e-5, False)
  return torch.tanh(y)
)";

// The same weights each time; `source` is its code.
Module net(const std::string& source = kNet) {
  Module m("Net");
  m.register_attribute("training", c10::BoolType::get(), true);
  auto generator = at::detail::getDefaultCPUGenerator().clone();
  generator.set_current_seed(3);
  auto parameter = [&](const char* name, at::Tensor t) {
    t.set_requires_grad(true);
    m.register_parameter(name, t, false);
  };
  parameter("weight", at::randn({4, 3, 3, 3}, generator));
  parameter("bias", at::randn({4}, generator));
  parameter("gamma", at::ones({4}));
  parameter("beta", at::zeros({4}));
  m.register_buffer("mean", at::zeros({4}));
  m.register_buffer("var", at::ones({4}));
  m.define(source);
  return m;
}

std::string with(std::string source, const std::string& from, const std::string& to) {
  auto at = source.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return source.replace(at, from.size(), to);
}

VerifyOptions quick() {
  VerifyOptions o;
  o.calls = 3;
  o.seeds = 3;
  o.measure = false;
  return o;
}

std::vector<IValue> image() {
  auto generator = at::detail::getDefaultCPUGenerator().clone();
  generator.set_current_seed(8);
  return {at::randn({4, 3, 8, 8}, generator)};
}

VerifyResult check(const Module& a, const Module& b) { return verify(a, b, image(), quick()); }

void expect_unequal(const Module& b, const std::string& part) {
  auto r = check(net(), b);
  EXPECT_FALSE(r.equal);
  bool found = false;
  for (auto& d : r.differences) found |= d.find(part) != std::string::npos;
  EXPECT_TRUE(found) << part << " not in: " << r.verdict;
  EXPECT_NE(r.verdict.find('.'), std::string::npos);
}

TEST(Verify, IdenticalModels) {
  auto r = check(net(), net());
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_TRUE(r.state_dict_equal);
  ASSERT_EQ(r.calls.size(), 9u);  // three each in train, eval, no_grad
  for (auto& c : r.calls) {
    EXPECT_EQ(c.output_error, 0) << c.mode;
    EXPECT_LT(c.gradient_error, 1e-5)
        << c.mode;  // TorchScript differentiates the first call otherwise than the later ones
    EXPECT_LT(c.f64_error, 1e-12) << c.mode;
    EXPECT_GT(c.reference_output[0], 0);  // float32 is not float64
    EXPECT_LT(c.reference_output[0], 1e-4);
  }
  EXPECT_EQ(r.calls[0].mode, "train");
  EXPECT_EQ(r.calls[8].mode, "no_grad");
  EXPECT_EQ(r.ratio_gradient, 1);
}

TEST(Verify, OtherRoundingIsAccepted) {
  auto r = check(net(), net(with(kNet, "torch.tanh(y)", "torch.sigmoid(y * 2) * 2 - 1")));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_GT(r.calls[0].output_error, 0);
  EXPECT_LT(r.calls[0].f64_error, 1e-9);
}

// Of a network that ends in a norm of two samples: most gradients are zero but for rounding.
TEST(Verify, GradientsOfZerosAreHeldAgainstTheLargest) {
  const auto gradients = [](double largest, double zero) {
    std::vector<tsmem::Named> all = {{"head", at::full({8}, largest, at::kDouble)}};
    for (const char* name : {"a", "b", "c"}) all.push_back({name, at::full({8}, zero, at::kDouble)});
    return all;
  };
  EXPECT_LT(tsmem::worst(gradients(200, 3e-15), gradients(200, -2e-14)), 1e-9);
  EXPECT_GT(tsmem::worst(gradients(200, 2e-9), gradients(200, 3e-9)), 1e-8);
  EXPECT_GT(tsmem::worst(gradients(200, 1), gradients(200, 1 + 1e-8)), 1e-9);
  EXPECT_GT(tsmem::worst(gradients(200 + 1e-6, 0), gradients(200, 0)), 1e-9);
}

TEST(Verify, ChangedWeights) {
  auto b = net();
  {
    at::NoGradGuard guard;
    b.attr("weight").toTensor().add_(1e-3);
  }
  expect_unequal(b, "Parameter 'weight' has other values");
  EXPECT_FALSE(check(net(), b).state_dict_equal);
}

TEST(Verify, OverwrittenParameters) {
  const std::string line = "  y = torch.conv2d(x, self.weight, self.bias)\n";
  const auto scaled = with(kNet, line, "  self.gamma.detach().mul_(0.5)\n" + line);
  const Module a = net(scaled);
  const auto before = a.attr("gamma").toTensor().clone();
  EXPECT_TRUE(check(a, net(scaled)).equal);
  EXPECT_TRUE(a.attr("gamma").toTensor().equal(before));
  // Also where it leaves its results as they are, and in a single call.
  auto once = quick();
  once.calls = once.seeds = 1;
  const auto alone = with(kNet, "  return torch.tanh(y)", "  self.bias.detach().mul_(0.5)\n  return torch.tanh(y)");
  EXPECT_FALSE(verify(a, net(), image(), once).equal);
  EXPECT_FALSE(verify(net(), net(alone), image(), once).equal);
  EXPECT_TRUE(verify(net(alone), net(alone), image(), once).equal);
}

TEST(Verify, ParametersOverwrittenThroughData) {
  // No version counts it.
  const auto scaled = with(kNet, "  return torch.tanh(y)", "  self.bias.data.mul_(0.5)\n  return torch.tanh(y)");
  const Module a = net(scaled);
  const auto before = a.attr("bias").toTensor().clone();
  EXPECT_TRUE(check(a, net(scaled)).equal);
  EXPECT_TRUE(a.attr("bias").toTensor().equal(before));
  EXPECT_FALSE(check(a, net()).equal);
  auto once = quick();
  once.calls = once.seeds = 1;
  EXPECT_FALSE(verify(net(), net(scaled), image(), once).equal);
}

TEST(Verify, AttributesThatAreNoTensors) {
  const auto made = [](const std::string& change) {
    auto m = net("");
    m.register_attribute("count", c10::IntType::get(), static_cast<int64_t>(0));
    m.register_attribute("seen", c10::ListType::create(c10::TensorType::get()), c10::List<at::Tensor>());
    m.register_attribute("share", c10::FloatType::get(), 0.5);
    m.define(with(kNet, "  return", change + "  return"));
    return m;
  };
  const std::string none, counts = "  self.count = self.count + 1\n", keeps = "  self.seen.append(y.detach())\n",
                          shares = "  self.share = float(y.mean().item())\n";
  for (const auto& change : {counts, keeps, shares}) {
    EXPECT_TRUE(check(made(change), made(change)).equal) << change;
    EXPECT_FALSE(check(made(change), made(none)).equal) << change;
    EXPECT_FALSE(check(made(none), made(change)).equal) << change;
  }
  EXPECT_FALSE(check(made(keeps), made("  self.seen.append(y.detach() * 2)\n")).equal);
}

TEST(Verify, OutputsThatAreNoTensors) {
  const auto with_more = [](const std::string& more) {
    return net(with(kNet, "torch.tanh(y)", "torch.tanh(y), " + more));
  };
  for (const auto& [one, other] : std::vector<std::pair<std::string, std::string>>{{"3", "4"},
                                                                                   {"'a'", "'b'"},
                                                                                   {"[1, 2]", "[1, 2, 2]"},
                                                                                   {"{'a': 1}", "{'b': 1}"},
                                                                                   {"1.5", "2.5"},
                                                                                   {"True", "False"}}) {
    EXPECT_TRUE(check(with_more(one), with_more(one)).equal) << one;
    EXPECT_FALSE(check(with_more(one), with_more(other)).equal) << one;
  }
}

TEST(Verify, WhatOutputsAre) {
  const auto expect_told = [](const std::string& a, const std::string& b, const std::string& part) {
    const auto returning = [](const std::string& text) { return net(with(kNet, "  return torch.tanh(y)", text)); };
    EXPECT_TRUE(check(returning(a), returning(a)).equal) << a;
    EXPECT_TRUE(check(returning(b), returning(b)).equal) << b;
    const auto r = check(returning(a), returning(b));
    EXPECT_TRUE(std::any_of(r.differences.begin(), r.differences.end(),
                            [&](const std::string& d) { return d.find(part) != std::string::npos; }))
        << part << " not in: " << r.verdict;
  };
  expect_told("  return torch.tanh(y), x", "  return torch.tanh(y), x.clone()",
              "output 1 has memory of its own in train mode, the first model's is in the memory of input 0.");
  expect_told("  return torch.tanh(y), self.mean.clone()", "  return torch.tanh(y), self.mean",
              "output 1 is in the memory of 'mean' in train mode, the first model's has memory of its own.");
  expect_told("  z = torch.tanh(y)\n  return z, z", "  z = torch.tanh(y)\n  return z, z.clone()",
              "output 1 has memory of its own in train mode, the first model's is in the memory of output 0.");
  expect_told("  return torch.tanh(y), y", "  return torch.tanh(y), y.detach()",
              "output 1 requires no gradient in train mode, the first model's requires a gradient.");
  expect_told("  return torch.tanh(y)", "  return torch.tanh(y).transpose(0, 1).contiguous().transpose(0, 1)",
              "output 0 has its dimensions in memory in the order (1, 0, 2, 3) in train mode, the first model's is "
              "contiguous.");
}

TEST(Verify, CodeThatCastsToFloat32) {
  // In float64 too its results differ by that dtype's rounding.
  const auto cast = [](const std::string& text) { return net(with(kNet, "torch.tanh(y)", text + ".to(y.dtype)")); };
  const Module a = cast("torch.tanh(y.float())");
  const auto r = check(a, cast("(torch.sigmoid(y.float() * 2) * 2 - 1)"));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_GT(r.calls[0].f64_error, 1e-9);
  EXPECT_TRUE(std::any_of(r.notes.begin(), r.notes.end(),
                          [](const std::string& n) { return n.find("casts to float32") != std::string::npos; }));
  EXPECT_FALSE(check(a, cast("torch.tanh(y.float() * 1.00001)")).equal);
}

TEST(Verify, ChangedMathematics) {
  expect_unequal(net(with(kNet, "torch.tanh(y)", "torch.sigmoid(y)")), "In float64 in train mode the models differ");
  expect_unequal(net(with(kNet, "1e-5", "1.01e-5")), "In float64");
}

TEST(Verify, ChangedGradientAlone) {
  // The same output, and half the gradient.
  expect_unequal(net(with(kNet, "torch.tanh(y)", "torch.tanh(y) * 0.5 + (torch.tanh(y) * 0.5).detach()")),
                 "In float64 in train mode");
}

TEST(Verify, OtherDtypeOfAnOutput) {
  auto r = verify(net(), net(with(kNet, "torch.tanh(y)", "torch.tanh(y).double()")), image(), quick());
  EXPECT_FALSE(r.equal);
  const std::string text = "output 0 is Double in train mode, the first model's is Float.";
  EXPECT_TRUE(std::any_of(r.differences.begin(), r.differences.end(), [&](const std::string& d) {
    return d.find(text) != std::string::npos;
  })) << r.verdict;
}

TEST(Verify, StatisticsUpdatedTwice) {
  expect_unequal(net(with(kNet, "  return",
                          "  z = torch.batch_norm(y, self.gamma, self.beta, self.mean, self.var, self.training, 0.1, "
                          "1e-5, False)\n  return")),
                 "In float64 in train mode");
}

TEST(Verify, OnlyOneModeDiffers) {
  auto b =
      net(with(kNet, "  return torch.tanh(y)", "  if not self.training:\n    y = y + 1e-3\n  return torch.tanh(y)"));
  auto r = check(net(), b);
  EXPECT_FALSE(r.equal);
  EXPECT_NE(r.verdict.find("in eval mode"), std::string::npos) << r.verdict;
  auto o = quick();
  o.eval_mode = false;
  EXPECT_TRUE(verify(net(), b, image(), o).equal);
}

TEST(Verify, ChangedFlags) {
  auto b = net();
  b.attr("beta").toTensor().set_requires_grad(false);
  expect_unequal(b, "Parameter 'beta' needs a gradient in the first model alone");
  auto c = net();
  c.eval();
  expect_unequal(c, "The training flag of the model differs");
}

TEST(Verify, GradientInOneModelAlone) {
  auto b = net(with(kNet, "self.beta", "self.beta.detach()"));
  auto r = check(net(), b);
  EXPECT_FALSE(r.equal);
  EXPECT_EQ(r.gradients_only_in_a, std::vector<std::string>{"beta"});
  EXPECT_TRUE(r.gradients_only_in_b.empty());
  r = check(b, net());
  EXPECT_EQ(r.gradients_only_in_b, std::vector<std::string>{"beta"});
}

TEST(Verify, RandomStream) {
  auto dropped = with(kNet, "torch.tanh(y)", "torch.dropout(torch.tanh(y), 0.3, self.training)");
  auto r = check(net(dropped), net(dropped));
  EXPECT_TRUE(r.equal) << r.verdict;
  auto more = with(dropped, "  return", "  y = y + torch.rand([1]) * 0\n  return");
  r = check(net(dropped), net(more));
  EXPECT_FALSE(r.equal);
  EXPECT_NE(r.verdict.find("random"), std::string::npos) << r.verdict;
  expect_unequal(net(dropped), "random");
}

TEST(Verify, DrawsThatDependOnRoundingAreJudgedByTheFirstModelsOwn) {
  // As in a traced detector: it does not run in float64, and draws for what lies in the last digits of a feature.
  const std::string source = R"(
def forward(self, x):
  y = torch.tanh(torch.conv2d(x, self.weight, self.bias))
  one = torch.mm(torch.ones([1, 1]), y.float().sum().reshape([1, 1]).to(x.dtype))
  n = int(torch.frac(y.detach().float().sum() * 4096).item() * 64)
  return y * torch.rand([n + 1]).sum().clamp(1, 1) * one.detach().sign().abs()
)";
  const auto other =
      with(source, "torch.conv2d(x, self.weight, self.bias)", "torch.conv2d(x, self.weight * 1.0000002, self.bias)");
  auto r = check(net(source), net(other));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_TRUE(std::any_of(r.notes.begin(), r.notes.end(),
                          [](auto& n) { return n.find("own draws differ too") != std::string::npos; }));
  // Draws that do not depend on rounding, in a model that does not run in float64.
  const auto steady = with(source, "torch.rand([n + 1])", "torch.rand([3])");
  EXPECT_TRUE(check(net(steady), net(steady)).equal);
  r = check(net(steady), net(with(steady, "[3]", "[4]")));
  EXPECT_FALSE(r.equal);
  EXPECT_NE(r.verdict.find("draw random numbers differently"), std::string::npos) << r.verdict;
}

TEST(Verify, DrawsThatDependOnRoundingAreJudgedInFloat64) {
  const std::string source = R"(
def forward(self, x):
  drawn = torch.rand([EXACT])
  return torch.conv2d(x, self.weight, self.bias) + 0 * drawn.sum()
)";
  // float32 loses the last bits to the 64, float64 keeps them.
  const Module a = net(with(source, "EXACT", "1 if bool(((x + 64.0) - 64.0 == x).all()) else 2"));
  const VerifyResult r = verify(a, net(with(source, "EXACT", "1")), image(), quick());
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_TRUE(std::any_of(r.notes.begin(), r.notes.end(),
                          [](const std::string& n) { return n.find("depends on rounding") != n.npos; }));
}

TEST(Verify, SecondModelRaises) {
  expect_unequal(
      net(with(kNet, "  y = torch.conv2d", "  assert not self.training, \"no training\"\n  y = torch.conv2d")),
      "no training");
}

TEST(Verify, BothRaiseInOneMode) {
  auto source = with(kNet, "  y = torch.conv2d", "  assert self.training, \"only training\"\n  y = torch.conv2d");
  auto r = check(net(source), net(source));
  EXPECT_TRUE(r.equal) << r.verdict;
  ASSERT_FALSE(r.notes.empty());
  EXPECT_NE(r.notes[0].find("only training"), std::string::npos) << r.notes[0];
  r = check(net(source), net());
  EXPECT_FALSE(r.equal);
  EXPECT_NE(r.verdict.find("second does not"), std::string::npos) << r.verdict;
}

TEST(Verify, FirstModelNeverRuns) {
  try {
    verify(net(), net(), {at::ones({2, 5, 8, 8})}, quick());
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind, ErrorKind::input);
    EXPECT_NE(std::string(e.what()).find("The first model's forward fails"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("channels"), std::string::npos) << e.what();
  }
  EXPECT_THROW(verify(net(), net(), {}, quick()), Error);
  auto o = quick();
  o.method = "encode";
  EXPECT_THROW(verify(net(), net(), image(), o), Error);
}

TEST(Verify, WithoutFloat64) {
  auto source = with(kNet, "torch.tanh(y)", "torch.matmul(y, torch.ones([6, 6], dtype=6))");
  auto r = check(net(source), net(source));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_NE(r.verdict.find("does not run in float64"), std::string::npos) << r.verdict;
  r = check(net(source), net(with(source, "torch.matmul(y,", "torch.matmul(y * 1.001,")));
  EXPECT_FALSE(r.equal);
}

TEST(Verify, DiscreteChoicesAreJudgedByTheFirstModelsOwnSpread) {
  // The last digits decide: as chaotic in the one model as in the other.
  auto chaotic = with(kNet, "torch.tanh(y)", "torch.tanh(y) + (y * 1e6 - torch.floor(y * 1e6)).detach()");
  auto r = check(net(chaotic), net(with(chaotic, "torch.tanh(y)", "(torch.sigmoid(y * 2) * 2 - 1)")));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_GT(r.calls[0].reference_output[0], 1e-3);
}

// Steps that few elements are near: where one of them falls on the other side, the error of that call is large.
TEST(Verify, AnUnstableModelIsNotBlamedForOneCall) {
  const auto steps = with(kNet, "torch.tanh(y)", "torch.tanh(y) + torch.floor(torch.tanh(y.detach()) * 300)");
  const auto other = net(with(steps, "torch.tanh(y.detach())", "((torch.sigmoid(y.detach() * 2) - 0.5) * 2)"));
  const auto unstable = [](const VerifyResult& r) {
    return std::any_of(r.notes.begin(), r.notes.end(),
                       [](auto& n) { return n.find("differ in their last digits") != std::string::npos; });
  };
  auto o = quick();
  int times = 0;
  for (o.seed = 1; o.seed <= 30; ++o.seed) {
    const auto r = verify(net(steps), other, image(), o);
    EXPECT_TRUE(r.equal) << "seed " << o.seed << ": " << r.verdict;
    times += unstable(r);
  }
  EXPECT_GT(times, 0);
}

TEST(Verify, AFaultOfOneCallInFloat32IsNoInstability) {
  const auto counter = [](const std::string& source) {
    Module m = net();
    Module counting("Net");
    counting.register_attribute("training", c10::BoolType::get(), true);
    counting.register_attribute("count", c10::IntType::get(), 0);
    for (const auto& p : m.named_parameters()) counting.register_parameter(p.name, p.value, false);
    for (const auto& b : m.named_buffers()) counting.register_buffer(b.name, b.value);
    counting.define(source);
    return counting;
  };
  const auto counting = with(kNet, "  y = torch.conv2d", "  self.count = self.count + 1\n  y = torch.conv2d");
  const auto third =
      with(counting, "torch.tanh(y)", "torch.tanh(y * (1.001 if self.count == 3 and y.dtype == 6 else 1.0))");
  EXPECT_TRUE(verify(counter(counting), counter(counting), image(), quick()).equal);
  EXPECT_FALSE(verify(counter(counting), counter(third), image(), quick()).equal);
}

TEST(Verify, TheFirstModelsOwnCallsMayDiffer) {
  // Hardsigmoid's own backward has a sixth in float32, TorchScript's differentiation, which takes its place from the
  // second call on, in float64. It does not where the neighbour works in place.
  auto apart = with(kNet, "torch.tanh(y)", "torch.hardsigmoid(y) * torch.tanh(y)");
  auto r = check(net(apart), net(with(apart, "torch.hardsigmoid(y)", "torch.hardsigmoid_(y.clone())")));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_GT(r.calls[2].f64_error, 1e-9);
  ASSERT_FALSE(r.notes.empty());
  EXPECT_NE(r.notes[0].find("own spread"), std::string::npos);
}

TEST(Verify, NotANumberIsAValue) {
  auto nan = with(kNet, "torch.tanh(y)", "torch.log(y)");
  auto r = check(net(nan), net(nan));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_FALSE(check(net(nan), net()).equal);
}

TEST(Verify, InputsChangedInPlace) {
  auto changing = with(kNet, "  y = torch.conv2d", "  x.mul_(0.5)\n  y = torch.conv2d");
  auto r = check(net(changing), net(changing));
  EXPECT_TRUE(r.equal) << r.verdict;
  r = check(net(with(changing, "x.mul_(0.5)", "x = x * 0.5")), net(changing));
  EXPECT_FALSE(r.equal);
}

TEST(Verify, ArgumentsStayAsTheyAre) {
  auto a = net(), b = net();
  auto x = image();
  auto before = x[0].toTensor().clone();
  at::manual_seed(2);
  auto expected = at::rand({2});
  verify(a, b, x, quick());
  EXPECT_TRUE(a.attr("mean").toTensor().equal(at::zeros({4})));
  EXPECT_FALSE(a.attr("weight").toTensor().grad().defined());
  EXPECT_TRUE(a.is_training());
  EXPECT_TRUE(x[0].toTensor().equal(before));
  EXPECT_FALSE(x[0].toTensor().requires_grad());
}

TEST(Verify, MeasuresBoth) {
  auto o = quick();
  o.measure = true;
  auto r = verify(net(), net(with(kNet, "torch.tanh(y)", "torch.sigmoid(y * 2) * 2 - 1")), image(), o);
  EXPECT_TRUE(r.measured);
  for (int k : {0, 1}) {
    EXPECT_GT(r.saved_bytes[k], 0);
    EXPECT_GT(r.peak_bytes[k], r.saved_bytes[k]);
    EXPECT_GT(r.step_seconds[k], 0);
  }
  EXPECT_GT(r.saved_bytes[1], r.saved_bytes[0]);  // the sigmoid's output, and tanh's is the model's
}

// Pictures large enough for smaller ones to be used.
std::vector<IValue> large() {
  auto generator = at::detail::getDefaultCPUGenerator().clone();
  generator.set_current_seed(8);
  return {at::randn({4, 3, 130, 160}, generator)};
}

// The check of a model whose step is too long for the whole one.
VerifyResult hurried(const Module& a, const Module& b, const std::vector<IValue>& inputs = large()) {
  VerifyOptions o;
  o.thorough = false;
  o.measure = false;
  return verify(a, b, inputs, o);
}

TEST(Verify, HurriedComparesSmallerInputsAndThoseGiven) {
  const auto r = hurried(net(), net());
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_FALSE(r.thorough);
  ASSERT_EQ(r.calls.size(), 12u);
  for (const auto& c : r.calls) EXPECT_LT(c.f64_error, 1e-12) << c.mode;
  std::vector<std::string> what;
  for (const auto& c : r.compared) {
    EXPECT_EQ(c.inputs[0], c.given ? "4x3x130x160 float32" : "3x3x66x64 float32");
    EXPECT_EQ(c.dtypes.size(), c.given ? 1u : 2u);
    EXPECT_EQ(c.calls, !c.given ? 4 : c.mode == "train" ? 2 : 1) << c.mode;
    what.push_back(c.mode);
  }
  EXPECT_EQ(what, (std::vector<std::string>{"train", "train", "eval", "eval", "no_grad", "no_grad"}));
  EXPECT_EQ(compared_text(r),
            "Compared: 4 calls each in train, eval, no_grad on smaller inputs (3x3x66x64 float32) in float32 and "
            "float64; 2 calls in train on the inputs given (4x3x130x160 float32) in float32; 1 call each in eval, "
            "no_grad on the inputs given (4x3x130x160 float32) in float32. A thorough verification compares everything "
            "on the "
            "inputs given.");
}

// Once trained, on inputs that need no gradient, TorchScript draws for such a dropout without gradients too.
TEST(Verify, HurriedWithADropoutThatDropsNothing) {
  const auto block = [] {
    Module m("Block");
    for (const char* name : {"a", "b"}) m.register_parameter(name, at::eye(8).set_requires_grad(true), false);
    m.define(R"(
def forward(self, x):
  return torch.embedding(torch.dropout(torch.sigmoid(self.a * self.b), 0.0, True), x)
)");
    return m;
  };
  Module rewritten = block();
  rewrite(rewritten, {});
  VerifyOptions o;
  o.thorough = false;
  o.measure = false;
  o.spent = o.seconds;  // no time for eval mode, so that the model without gradients is the one trained
  const auto r = verify(block(), rewritten, {at::arange(8)}, o);
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_EQ(r.compared.back().mode, "no_grad");
}

TEST(Verify, HurriedTakesFewerOfALists) {
  const auto source =
      with(kNet, "def forward(self, x):", "def forward(self, xs: List[Tensor], n: int):\n  x = torch.stack(xs)");
  auto o = quick();
  o.calls = o.seeds = 0;
  o.thorough = false;
  const auto pixels = image()[0].toTensor();
  c10::List<at::Tensor> images;
  for (int64_t i = 0; i < pixels.size(0); ++i) images.push_back(pixels[i]);
  const auto r = verify(net(source), net(source), std::vector<IValue>{IValue(images), 3}, o);
  EXPECT_TRUE(r.equal) << r.verdict;
  ASSERT_FALSE(r.compared.empty());
  EXPECT_LT(r.compared[0].inputs.size(), 4u);
  EXPECT_EQ(r.compared[0].inputs[0], "3x8x8 float32");
  EXPECT_TRUE(std::any_of(r.compared.begin(), r.compared.end(), [](const auto& c) { return c.given; }));
}

// A picture of its own size alone: what is behind the flattening has a fixed size.
TEST(Verify, HurriedTakesFewerRowsWhereOnlyTheseFit) {
  const auto fixed = with(kNet, "torch.tanh(y)", "torch.flatten(y, 1) @ torch.ones([4 * 128 * 158, 2]).to(y)");
  const auto r = hurried(net(fixed), net(fixed));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_EQ(r.compared[0].inputs[0], "3x3x130x160 float32");
  // And none but the whole where the rows are fixed, too.
  const auto rigid = with(fixed, "  y = torch.conv2d", "  assert x.size(0) == 4\n  y = torch.conv2d");
  const auto all = hurried(net(rigid), net(rigid));
  EXPECT_TRUE(all.equal) << all.verdict;
  for (const auto& c : all.compared) EXPECT_TRUE(c.given);
}

// Smaller inputs must reach every parameter that those given do.
TEST(Verify, HurriedTakesInputsThatReachEveryParameter) {
  const auto deep =
      with(kNet, "self.gamma, self.beta,", "self.gamma if x.size(2) > 100 else torch.ones([4]), self.beta,");
  const auto r = hurried(net(deep), net(deep));
  EXPECT_TRUE(r.equal) << r.verdict;
  EXPECT_EQ(r.compared[0].inputs[0], "3x3x130x128 float32");
}

TEST(Verify, HurriedCatchesWhatTheWholeCheckDoes) {
  // Counts its calls, in an attribute that is no state.
  const auto counting = with(kNet, "  y = torch.conv2d", "  self.count = self.count + 1\n  y = torch.conv2d");
  const auto counter = [](const std::string& source) {
    Module m("Net");
    m.register_attribute("training", c10::BoolType::get(), true);
    m.register_attribute("count", c10::IntType::get(), 0);
    const auto plain = net();
    for (const auto& p : plain.named_parameters())
      m.register_parameter(p.name, p.value.clone().detach().requires_grad_(), false);
    for (const auto& b : plain.named_buffers()) m.register_buffer(b.name, b.value.clone());
    m.define(source);
    return m;
  };
  EXPECT_TRUE(hurried(counter(counting), counter(counting)).equal);
  const auto third = with(counting, "torch.tanh(y)", "torch.tanh(y) * (1.0001 if self.count == 3 else 1.0)");
  const std::string norm =
      "torch.batch_norm(y, self.gamma, self.beta, self.mean, self.var, self.training, 0.1, 1e-5, False)";
  EXPECT_FALSE(verify(counter(counting), counter(third), image(), quick()).equal);  // and so the whole check
  const std::tuple<const char*, Module, Module> faults[] = {
      {"third call", counter(counting), counter(third)},
      {"gradient", net(), net(with(kNet, "torch.tanh(y)", "torch.tanh(y) * 0.999 + (torch.tanh(y) * 0.001).detach()"))},
      {"buffers", net(), net(with(kNet, "  return", "  z = " + norm + "\n  return"))},
      {"eval", net(),
       net(with(kNet, "  return torch.tanh(y)", "  if not self.training:\n    y = y + 1e-5\n  return torch.tanh(y)"))},
      {"without grad", net(),
       net(with(kNet, "  return torch.tanh(y)",
                "  if not torch.is_grad_enabled():\n    y = y + 1e-5\n  return torch.tanh(y)"))},
      {"large pictures", net(),
       net(with(kNet, "torch.tanh(y)", "torch.tanh(y * (1.001 if x.size(2) > 100 else 1.0))"))},
      {"all rows", net(), net(with(kNet, "torch.tanh(y)", "torch.tanh(torch.cat([y[:3], y[3:] * 1.001]))"))},
      {"float32 alone", net(), net(with(kNet, "torch.tanh(y)", "torch.tanh(y * (1.001 if y.dtype == 6 else 1.0))"))},
  };
  for (const auto& [name, a, b] : faults) {
    EXPECT_FALSE(hurried(a, b).equal) << name;
  }
}

TEST(Verify, ASecondModelThatRaisesIsToBlame) {
  const auto broken = net(with(kNet, "  y = torch.conv2d", "  assert False, \"out of order\"\n  y = torch.conv2d"));
  for (bool in_time : {false, true}) {
    auto o = quick();
    o.measure = true;
    if (!in_time) o.thorough = false;
    const auto r = verify(net(), broken, image(), o);
    EXPECT_FALSE(r.equal);
    EXPECT_EQ(
        r.verdict.find("The second model's forward fails on call 1 in train mode, where the first model's does not"),
        0u)
        << r.verdict;
    EXPECT_NE(r.verdict.find("out of order"), std::string::npos) << r.verdict;
  }
  EXPECT_THROW(verify(broken, net(), image(), quick()), Error);
  // A method that the second lacks is a difference in structure.
  const auto more = net(std::string(kNet) + "\ndef encode(self, x):\n  return x * self.gamma[0]\n");
  auto o = quick();
  o.method = "encode";
  const auto r = verify(more, net(), image(), o);
  EXPECT_FALSE(r.equal);
  EXPECT_NE(r.verdict.find("'encode'"), std::string::npos) << r.verdict;
}

TEST(Verify, Json) {
  auto j = to_json(check(net(), net(with(kNet, "self.beta", "self.beta.detach()"))));
  EXPECT_FALSE(j["equal"]);
  EXPECT_EQ(j["gradients_only_in"]["a"][0], "beta");
  EXPECT_TRUE(j["state_dict_equal"]);
  EXPECT_TRUE(j["thorough"]);  // there was time
  EXPECT_EQ(j["compared"][0]["inputs"][0], "4x3x8x8 float32");
  EXPECT_EQ(j["compared"][0]["dtypes"], (std::vector<std::string>{"float32", "float64"}));
  for (auto key : {"saved_bytes", "peak_bytes", "step_seconds"}) EXPECT_EQ(j[key].size(), 2u);
  for (auto key : {"mode", "output_error", "gradient_error", "buffer_error", "f64_error"})
    EXPECT_TRUE(j["calls"][0].contains(key)) << key;
  for (auto key : {"output", "gradient", "buffer"}) EXPECT_EQ(j["calls"][0]["reference_errors"][key].size(), 2u);
}

TEST(Structure, DormantMethodsAreNoDifference) {
  auto b = net();
  b.define("def _tsmem_original_forward(self, x):\n  return x\n");
  EXPECT_TRUE(structure_differences(net(), b).empty());
  b.define("def extra(self, x):\n  return x\n");
  auto d = structure_differences(net(), b);
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "Method 'extra' of the model is only in the second model.");
}

TEST(Structure, EachDifferenceIsNamed) {
  auto first = [](const std::function<void(Module&)>& change) {
    auto a = net(), b = net();
    change(b);
    auto d = structure_differences(a, b);
    return d.empty() ? std::string() : d[0];
  };
  EXPECT_EQ(first([](Module&) {}), "");
  EXPECT_EQ(first([](Module& m) { m.register_buffer("more", at::ones({1})); }),
            "Buffer 'more' is only in the second model.");
  EXPECT_EQ(first([](Module& m) { m.register_attribute("flag", c10::BoolType::get(), true); }),
            "Attribute 'flag' is only in the second model.");
  EXPECT_EQ(first([](Module& m) { m.register_module("sub", Module("Sub")); }),
            "Module 'sub' is only in the second model.");
  EXPECT_NE(first([](Module& m) {
              m.attr("mean").toTensor().set_data(at::zeros({5}));
            }).find("Buffer 'mean' is Float 4 in the first"),
            std::string::npos);
  EXPECT_NE(first([](Module& m) {
              m.attr("mean").toTensor().set_data(at::zeros({4}, at::kDouble));
            }).find("Double 4 in the second"),
            std::string::npos);
  EXPECT_EQ(first([](Module& m) { m.setattr("var", m.attr("mean")); }), "Buffer 'var' has other values.");
  auto other = net("def forward(self, x, y: int = 3):\n  return x\n");
  EXPECT_NE(structure_differences(net(), other)[0].find(
                "Method 'forward' of the model is (x: Tensor) -> Tensor in the first"),
            std::string::npos);
}

TEST(Structure, SharingCounts) {
  auto tied = [](bool tie) {
    Module m("Tied");
    auto t = at::ones({2});
    m.register_parameter("a", t, false);
    m.register_parameter("b", tie ? t : at::ones({2}), false);
    m.define("def forward(self, x):\n  return x * self.a * self.b\n");
    return m;
  };
  EXPECT_TRUE(structure_differences(tied(true), tied(true)).empty());
  auto d = structure_differences(tied(true), tied(false));
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "'b' shares its memory with 'a' in the first model alone.");
}

}  // namespace
}  // namespace tsmem
