// Matching and applying, on models written as TorchScript text: what is put where, what is refused and why, and the way
// back.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/testing/file_check.h>

#include <sstream>

#include "patterns/pattern.h"
#include "rewriter/compare/diff.h"
#include "rewriter/error.h"
#include "rewriter/rewrite/match.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/verify/verify.h"

using torch::jit::Module;
using torch::jit::testing::FileCheck;
using tsmem::rewrite;
using tsmem::RewriteOptions;
using tsmem::RewriteReport;

namespace {

Module module(const std::string& name) {
  Module m(name);
  m.register_attribute("training", c10::BoolType::get(), true);
  return m;
}

Module norm(int64_t channels = 4) {
  Module m = module("Norm");
  m.register_parameter("weight", at::rand({channels}) + 0.5, false);
  m.register_parameter("bias", at::randn({channels}), false);
  m.register_buffer("running_mean", at::zeros({channels}));
  m.register_buffer("running_var", at::ones({channels}));
  m.register_buffer("count", at::zeros({}, at::kLong));
  m.define(R"(
    def forward(self, x):
        if self.training:
            self.count.add_(1)
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-5, True)
  )");
  return m;
}

Module conv(int64_t in = 4, int64_t out = 4) {
  Module m = module("Conv");
  m.register_parameter("weight", at::randn({out, in, 3, 3}) * 0.2, false);
  m.define("def forward(self, x):\n    return torch.conv2d(x, self.weight, None, [1, 1], [1, 1], [1, 1], 1)\n");
  return m;
}

Module net(const std::string& forward) {
  Module m = module("Net");
  m.register_module("conv", conv());
  m.register_module("bn", norm());
  m.register_module("bn2", norm());
  m.define(forward);
  return m;
}

std::string graph(const Module& m, const std::string& method = "forward") {
  return m.get_method(method).graph()->toString(false);
}

std::vector<std::string> names(const RewriteReport& r) {
  std::vector<std::string> out;
  for (const auto& m : r.matches) out.push_back(m.pattern);
  std::sort(out.begin(), out.end());
  return out;
}

bool matched(const RewriteReport& r, const std::string& pattern) {
  const auto all = names(r);
  return std::find(all.begin(), all.end(), pattern) != all.end();
}

bool refused(const RewriteReport& r, const std::string& pattern, const std::string& part) {
  for (const auto& x : r.refused)
    if (x.pattern == pattern && x.reason.find(part) != std::string::npos) return true;
  return false;
}

Module reload(const Module& m) {
  std::stringstream s;
  m.save(s);
  return torch::jit::load(s);
}

RewriteOptions only(std::vector<std::string> patterns) {
  RewriteOptions o;
  o.only = std::move(patterns);
  return o;
}

// The rewritten model computes what the original does: outputs, gradients, buffers, in both modes, also after save and
// load.
void expect_same_numbers(const Module& original, const Module& rewritten, std::vector<c10::IValue> inputs) {
  tsmem::VerifyOptions o;
  o.measure = false;
  o.seeds = 2;
  const auto r = tsmem::verify(original, reload(rewritten), inputs, o);
  EXPECT_TRUE(r.equal) << r.verdict;
}

std::vector<c10::IValue> image() { return {at::randn({3, 4, 9, 7})}; }

using V = std::vector<std::string>;

}  // namespace

TEST(Rewrite, CrossesTheCallsOfAMatchAndLeavesTheOthers) {
  Module m = net("def forward(self, x):\n    return torch.relu_(self.bn.forward(self.conv.forward(x)))\n");
  Module original = reload(m);
  const auto r = rewrite(m, {});
  EXPECT_EQ(names(r), (V{"bn-act", "conv"}));
  FileCheck()
      .check("prim::CallMethod[name=\"forward\"]")
      ->check("tsmem::batch_norm_act")
      ->check_not("aten::relu_")
      ->run(graph(m));
  FileCheck().check("tsmem::conv2d")->run(graph(m.attr("conv").toModule()));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, MethodsOfItsOwnStayCallableAndAreRewrittenToo) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(x))\n");
  rewrite(m, {});
  FileCheck().check("tsmem::batch_norm_act")->run(graph(m.attr("bn").toModule()));
}

TEST(Rewrite, EverySpellingOfAnActivation) {
  for (const char* spelling :
       {"torch.relu(y)", "torch.relu_(y)", "torch.hardtanh(y, 0, 6)", "torch.leaky_relu_(y, 0.2)",
        "torch.hardsigmoid(y)", "torch.silu_(y)", "torch.hardswish(y)", "torch.gelu(y)",
        "torch.gelu(y, approximate=\"tanh\")", "torch.sigmoid_(y)", "torch.tanh(y)", "torch.elu(y, 0.7)",
        "torch.selu(y)", "torch.celu(y, 1.5)", "torch.softplus(y)", "torch.mish(y)", "torch.threshold(y, 0.1, 0.3)",
        "torch.relu6(y)"}) {
    SCOPED_TRACE(spelling);
    Module m = net(std::string("def forward(self, x):\n    y = self.bn.forward(x)\n    return ") + spelling + "\n");
    Module original = reload(m);
    const auto r = rewrite(m, {});
    EXPECT_EQ(names(r), V{"bn-act"});
    expect_same_numbers(original, m, image());
  }
}

TEST(Rewrite, ResidualInEitherOrderAndInPlace) {
  for (const char* sum : {"self.bn.forward(y) + x", "x + self.bn.forward(y)", "self.bn.forward(y).add_(x)"}) {
    SCOPED_TRACE(sum);
    Module m =
        net(std::string("def forward(self, x):\n    y = self.conv.forward(x)\n    return torch.relu(") + sum + ")\n");
    Module original = reload(m);
    EXPECT_EQ(names(rewrite(m, {})), (V{"bn-add-act", "conv"}));
    expect_same_numbers(original, m, image());
  }
}

TEST(Rewrite, TwoNormsAddedOneTakesTheSum) {
  Module m =
      net("def forward(self, x):\n    y = self.conv.forward(x)\n    return torch.relu(self.bn.forward(y) + "
          "self.bn2.forward(x))\n");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, {})), (V{"batch-norm", "bn-add-act", "conv"}));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, StemAndSqueezeExcite) {
  Module stem = net(
      "def forward(self, x):\n    return torch.max_pool2d(torch.relu(self.bn.forward(x)), [3, 3], [2, 2], [1, 1])\n");
  Module stem_original = reload(stem);
  EXPECT_EQ(names(rewrite(stem, {})), V{"bn-act-max-pool"});
  expect_same_numbers(stem_original, stem, image());
  Module se = net(R"(
    def forward(self, x):
        z = torch.silu(self.bn.forward(x))
        s = torch.sigmoid(torch.adaptive_avg_pool2d(z, [1, 1]))
        return s * z
  )");
  Module se_original = reload(se);
  EXPECT_EQ(names(rewrite(se, {})), (V{"bn-act-mul", "shape-only"}));
  expect_same_numbers(se_original, se, image());
}

TEST(Rewrite, PadsThatReflectOrReplicate) {
  for (const char* pad : {"torch.reflection_pad2d(x, [1, 2, 3, 0])", "torch.replication_pad2d(x, [1, 2, 3, 0])",
                          "torch.pad(x, [1, 1, 2, 2], \"reflect\")", "torch.pad(x, [1, 1, 2, 2], \"replicate\")",
                          "torch.reflection_pad1d(x[0], [1, 2])", "torch.replication_pad3d(x, [1, 1, 1, 1, 0, 2])"}) {
    Module m = net(std::string("def forward(self, x):\n    x = self.conv.forward(x)\n    return ") + pad + "\n");
    Module original = reload(m);
    EXPECT_EQ(names(rewrite(m, only({"shape-only"}))), V{"shape-only"}) << pad;
    expect_same_numbers(original, m, image());
  }
}

TEST(Rewrite, DoesNotTouchPadsThatKeepNoInput) {
  for (const char* pad : {"torch.pad(x, [1, 1, 2, 2])", "torch.pad(x, [1, 1, 2, 2], \"constant\", 3.)",
                          "torch.pad(x, [1, 1, 2, 2], \"circular\")",
                          "torch.pad(x, [1, 1, 2, 2], \"reflect\" if x.size(0) > 1 else \"replicate\")"}) {
    Module m = net(std::string("def forward(self, x):\n    return ") + pad + "\n");
    EXPECT_EQ(names(rewrite(m, only({"shape-only"}))), V{}) << pad;
  }
}

TEST(Rewrite, ActivationTimesScaleWithoutANorm) {
  Module m =
      net("def forward(self, x):\n    z = torch.silu(self.conv.forward(x))\n    return z * z.mean([2, 3], True)\n");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, only({"act-mul"}))), V{"act-mul"});
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, BranchesAndLoops) {
  Module m = net(R"(
    def forward(self, x):
        if x.size(0) > 1:
            x = torch.relu(self.bn.forward(x))
        else:
            x = torch.tanh(self.bn2.forward(x))
        for i in range(2):
            x = torch.relu_(self.conv.forward(x))
        return x
  )");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, {})), (V{"activation", "bn-act", "bn-act", "conv"}));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, ConstantBranchesAreTransparent) {
  Module m = net(R"(
    def act(self, x, inplace: bool):
        if inplace:
            r = torch.relu_(x)
        else:
            r = torch.relu(x)
        return r
    def forward(self, x):
        return self.act(self.bn.forward(x), True)
  )");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, only({"bn-act"}))), V{"bn-act"});
  FileCheck().check("tsmem::batch_norm_act")->check_not("aten::relu")->run(graph(m));
  expect_same_numbers(original, m, image());
}

// torchvision's detection models ask `_is_tracing()`: the call stays, the branch that it decides does not.
TEST(Rewrite, BranchesOnACallThatReturnsAConstantAreTransparent) {
  Module m = net(R"(
    def exporting(self):
        return False
    def forward(self, x):
        y = self.bn.forward(x)
        if self.exporting():
            z = y
        else:
            z = torch.relu(y)
        return z
  )");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, only({"bn-act"}))), V{"bn-act"});
  FileCheck().check("tsmem::batch_norm_act")->check_not("aten::relu")->run(graph(m));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, InPlaceActivationOfACallersTensorIsLegalInTheCaller) {
  Module act = module("Act");
  act.define("def forward(self, x):\n    return torch.relu_(x)\n");
  Module m = module("Net");
  m.register_module("conv", conv());
  m.register_module("act", act);
  m.define("def forward(self, x):\n    return self.act.forward(self.conv.forward(x))\n");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, {})), (V{"activation", "conv"}));
  FileCheck().check("tsmem::act")->run(graph(m));
  FileCheck().check("aten::relu_")->run(graph(m.attr("act").toModule()));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, DoesNotTakeANormWithASecondUser) {
  Module m = net("def forward(self, x):\n    y = self.bn.forward(x)\n    return torch.relu(y) + y\n");
  const auto r = rewrite(m, only({"bn-act"}));
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-act", "bn (aten::batch_norm) has 1 other user")) << r.refused.at(0).reason;
}

TEST(Rewrite, DoesNotTakeAnActivationThatOverwritesTheCallersTensor) {
  Module m = net("def forward(self, x):\n    return torch.relu_(x)\n");
  const auto r = rewrite(m, {});
  EXPECT_FALSE(matched(r, "activation"));
  EXPECT_TRUE(refused(r, "activation", "may be seen from elsewhere"));
}

TEST(Rewrite, DoesNotTakeAnOverwriteThroughAView) {
  Module m = net(
      "def forward(self, x):\n    y = self.conv.forward(x)\n    v = y.view([-1])\n    z = torch.relu_(y)\n    return "
      "z.sum() + v.sum()\n");
  const auto r = rewrite(m, {});
  EXPECT_EQ(names(r), V{"conv"});
  EXPECT_TRUE(refused(r, "activation", "aten::view uses too")) << r.refused.at(0).reason;
}

TEST(Rewrite, DoesNotMoveANormOverAWriteToItsInput) {
  Module m =
      net("def forward(self, x):\n    c = self.conv.forward(x)\n    y = self.bn.forward(c)\n    c.add_(1)\n    return "
          "torch.relu(y) + c\n");
  Module original = reload(m);
  const auto r = rewrite(m, only({"bn-act"}));
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-act", "writes to an input of the match")) << r.refused.at(0).reason;
}

TEST(Rewrite, DoesNotMoveANormOverAnotherUseOfItsStatistics) {
  Module m =
      net("def forward(self, x):\n    y = self.bn.forward(x)\n    w = self.bn.forward(x * 2)\n    return torch.relu(y) "
          "+ w\n");
  Module original = reload(m);
  const auto r = rewrite(m, only({"bn-act"}));
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-act", "writes to an input of the match"));
}

TEST(Rewrite, DoesNotTakeANormWithTiedStatisticsOverEachOther) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(x) + self.bn2.forward(x + 1))\n");
  m.attr("bn2").toModule().setattr("running_mean", m.attr("bn").toModule().attr("running_mean"));
  m.attr("bn2").toModule().setattr("running_var", m.attr("bn").toModule().attr("running_var"));
  Module original = reload(m);
  const auto r = rewrite(m, {});
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, DoesNotTakeASumWithAFactor) {
  Module m = net("def forward(self, x):\n    return torch.relu(torch.add(self.bn.forward(x), x, alpha=2))\n");
  const auto r = rewrite(m, only({"bn-add-act"}));
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-add-act", "factor"));
}

TEST(Rewrite, DoesNotTakeClampForRelu) {
  // Their gradients differ at the border.
  Module m = net("def forward(self, x):\n    return torch.clamp_min(self.bn.forward(x), 0.)\n");
  EXPECT_EQ(names(rewrite(m, {})), V{"batch-norm"});
}

TEST(Rewrite, DoesNotTakeAnActivationWhoseSlopeIsComputed) {
  Module m = net("def forward(self, x, slope: float):\n    return torch.leaky_relu(self.bn.forward(x), slope)\n");
  const auto r = rewrite(m, only({"bn-act"}));
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-act", "not a constant"));
}

TEST(Rewrite, DoesNotTakeAPoolWhoseIndicesAreUsed) {
  Module m = net("def forward(self, x):\n    v, i = torch.adaptive_max_pool2d(x, [2, 2])\n    return v * i\n");
  const auto r = rewrite(m, {});
  EXPECT_FALSE(matched(r, "max-pool"));
  EXPECT_TRUE(refused(r, "max-pool", "indices"));
}

TEST(Rewrite, DoesNotMatchAcrossBranches) {
  Module m =
      net("def forward(self, x):\n    y = self.bn.forward(x)\n    if y.size(0) > 1:\n        y = torch.relu(y)\n    "
          "return y\n");
  const auto r = rewrite(m, only({"bn-act"}));
  EXPECT_TRUE(r.matches.empty());
}

TEST(Rewrite, DoesNotTakeAnOverwriteOfWhatABranchGivesOutTwice) {
  Module m = net(R"(
    def forward(self, x):
        if x.size(0) > 1:
            y = self.conv.forward(x)
            identity = y
        else:
            y = self.conv.forward(x)
            identity = x
        y = torch.relu_(y)
        return y + identity
  )");
  Module original = reload(m);
  const auto r = rewrite(m, {});
  EXPECT_FALSE(matched(r, "activation"));
  EXPECT_TRUE(refused(r, "activation", "gives out twice"));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, DoesNotTakeAnOverwriteWithoutGradOfATensorMadeWithGrad) {
  Module m = net(R"(
    def forward(self, x):
        y = self.conv.forward(x)
        torch.set_grad_enabled(False)
        y = torch.relu_(y)
        torch.set_grad_enabled(True)
        return y * 2
  )");
  Module original = reload(m);
  const auto r = rewrite(m, {});
  EXPECT_FALSE(matched(r, "activation"));
  EXPECT_TRUE(refused(r, "activation", "made outside its `with` block"));
  expect_same_numbers(original, m, image());
}

TEST(Rewrite, DoesNotTakeAnInnerValueForTheOtherOperand) {
  for (const char* product : {"y * torch.sigmoid(y)", "torch.relu(y + y)", "torch.sigmoid(y) * y"}) {
    SCOPED_TRACE(product);
    Module m = net(
        fmt::format("def forward(self, x):\n    y = self.bn.forward(self.conv.forward(x))\n    return {}\n", product));
    Module original = reload(m);
    const auto r = rewrite(m, {});
    EXPECT_TRUE(matched(r, "batch-norm"));
    expect_same_numbers(original, m, image());
  }
}

// What a norm reads may be anything but its own output.
TEST(Rewrite, TheActivationMayBeTheOtherOperand) {
  Module m =
      net("def forward(self, x):\n    z = torch.silu(self.bn.forward(self.conv.forward(x)))\n    return z * z\n");
  Module original = reload(m);
  EXPECT_TRUE(matched(rewrite(m, {}), "bn-act-mul"));
  expect_same_numbers(original, m, image());
}

// A check that is called with the norm's input, as BatchNorm2d's of its dimensions.
TEST(Rewrite, ACallThatAsksForTheSizeOfAnInnerValueIsInlined) {
  for (const char* body : {"assert x.dim() == 4\n    return None", "return None"}) {
    SCOPED_TRACE(body);
    Module check = module("Check");
    check.define(fmt::format("def forward(self, x):\n    {}\n", body));
    Module m = module("Net");
    m.register_module("conv", conv());
    m.register_module("bn", norm());
    m.register_module("check", check);
    m.define(
        "def forward(self, x):\n    y = self.conv.forward(x)\n    self.check.forward(y)\n    return "
        "torch.relu(self.bn.forward(y))\n");
    Module original = reload(m);
    EXPECT_EQ(names(rewrite(m, only({"conv-bn-act"}))), V{"conv-bn-act"});
    expect_same_numbers(original, m, image());
  }
}

// The callee's own method may make its result from the residual; this caller writes to that.
TEST(Rewrite, ACallIsInlinedWhoseMatchIsIllegalForItsCaller) {
  Module end = module("End");
  end.register_module("bn", norm());
  end.define("def forward(self, x, r):\n    return torch.sigmoid(self.bn.forward(x) + r)\n");
  Module m = module("Net");
  m.register_module("conv", conv());
  m.register_module("end", end);
  m.define(
      "def forward(self, x):\n    r = self.conv.forward(x)\n    z = self.end.forward(x, r)\n    r.add_(1)\n    return "
      "z "
      "+ r\n");
  Module original = reload(m);
  rewrite(m, only({"bn-add-act", "conv"}));
  FileCheck().check("aten::sigmoid")->check_not("tsmem::batch_norm_add_act")->run(graph(m));
  FileCheck().check("tsmem::batch_norm_add_act")->run(graph(m.attr("end").toModule()));
  expect_same_numbers(original, m, image());
}

// A container: its parts are called by the user's code.
TEST(Rewrite, MethodsThatNothingCallsAreReported) {
  Module m = net("def forward(self, x):\n    return x\n");
  EXPECT_EQ(names(rewrite(m, {})), (V{"batch-norm", "batch-norm", "conv"}));
}

TEST(Rewrite, OneClassManyInstances) {
  Module block = net("def forward(self, x):\n    return torch.relu(self.bn.forward(self.conv.forward(x)))\n");
  Module m = module("Top");
  m.register_module("a", block);
  m.register_module("b", block.deepcopy());
  m.define("def forward(self, x):\n    return self.b.forward(self.a.forward(x))\n");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, {})), (V{"bn-act", "bn-act", "conv", "conv"}));
  expect_same_numbers(original, m, image());
  rewrite(m, {});
  RewriteOptions one;
  one.module_globs = {"a"};
  const auto r = rewrite(m, one);
  EXPECT_TRUE(r.matches.empty());
  EXPECT_TRUE(refused(r, "bn-act", "shares its class with b"));
}

TEST(Rewrite, EveryMethodAndOneMethod) {
  const char* code =
      "def forward(self, x):\n    return torch.relu(self.bn.forward(x))\ndef other(self, x):\n    return "
      "torch.relu(self.bn2.forward(x))\n";
  Module m = net(code);
  EXPECT_EQ(rewrite(m, {}).matches.size(), 2u);
  RewriteOptions one;
  one.method = "other";
  Module n = net(code);
  EXPECT_EQ(rewrite(n, one).matches.at(0).method, "other");
  FileCheck().check("aten::relu")->run(graph(n, "forward"));
  FileCheck().check("tsmem::batch_norm_act")->run(graph(n, "other"));
}

TEST(Rewrite, RestoreGivesTheSameGraphsWithTodaysWeights) {
  Module m = net("def forward(self, x):\n    return torch.relu_(self.bn.forward(self.conv.forward(x)))\n");
  Module original = reload(m);
  rewrite(m, {});
  Module loaded = reload(m);
  EXPECT_TRUE(tsmem::is_rewritten(loaded));
  {
    at::NoGradGuard no_grad;
    loaded.attr("bn").toModule().attr("weight").toTensor().fill_(3);
  }
  EXPECT_TRUE(tsmem::restore(loaded));
  EXPECT_FALSE(tsmem::is_rewritten(loaded));
  EXPECT_FALSE(tsmem::restore(loaded));
  loaded = reload(loaded);
  for (const auto& d : tsmem::diff(original, loaded)) EXPECT_EQ(d.status, "same") << d.path << "." << d.method;
  EXPECT_EQ(loaded.attr("bn").toModule().attr("weight").toTensor()[0].item<float>(), 3);
}

TEST(Rewrite, RewritingTwiceIsRewritingOnce) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(self.conv.forward(x)))\n");
  rewrite(m, {});
  const std::string once = graph(m);
  Module again = reload(m);
  rewrite(again, {});
  for (const auto& d : tsmem::diff(reload(m), reload(again))) EXPECT_EQ(d.status, "same") << d.path << "." << d.method;
}

TEST(Rewrite, KeepsSchemasDefaultsAndMethods) {
  Module m =
      net("def forward(self, x, scale: float = 2.0, *, flag: bool = True):\n    return torch.relu(self.bn.forward(x)) "
          "* scale\n");
  Module original = reload(m);
  rewrite(m, {});
  EXPECT_TRUE(tsmem::structure_differences(original, reload(m)).empty());
  std::ostringstream before, after;
  before << original.get_method("forward").function().getSchema();
  after << reload(m).get_method("forward").function().getSchema();
  EXPECT_EQ(before.str(), after.str());
}

TEST(Rewrite, FreezeAndTrain) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(self.conv.forward(x)))\n");
  RewriteOptions o;
  o.freeze = {"**"};
  o.train = {"bn"};
  rewrite(m, o);
  for (const auto& p : m.named_parameters()) EXPECT_EQ(p.value.requires_grad(), p.name.rfind("bn.", 0) == 0) << p.name;
}

TEST(Rewrite, UnknownNamesEndInASentence) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(x))\n");
  const auto message = [&](RewriteOptions o) {
    try {
      rewrite(m, o);
    } catch (const tsmem::Error& e) {
      EXPECT_EQ(e.kind, tsmem::ErrorKind::request);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  RewriteOptions pattern, method, module, freeze;
  pattern.only = {"bn-atc"};
  method.method = "foward";
  module.module_globs = {"layer9"};
  freeze.freeze = {"nothing.*"};
  EXPECT_NE(message(pattern).find("did you mean 'bn-act'"), std::string::npos) << message(pattern);
  EXPECT_NE(message(method).find("no method 'foward'"), std::string::npos);
  EXPECT_NE(message(module).find("No module matches"), std::string::npos);
  EXPECT_NE(message(freeze).find("No parameter matches"), std::string::npos);
}

TEST(Rewrite, ConvNormActAsOneOp) {
  for (const char* pattern : {"conv-bn-act", "conv-bn-act-recompute"}) {
    SCOPED_TRACE(pattern);
    Module m = net("def forward(self, x):\n    return torch.relu(self.bn.forward(self.conv.forward(x)))\n");
    Module original = reload(m);
    EXPECT_EQ(names(rewrite(m, only({pattern}))), V{pattern});
    FileCheck().check("tsmem::conv_batch_norm_act")->check_not("aten::batch_norm")->run(graph(m));
    expect_same_numbers(original, m, image());
  }
}

TEST(Rewrite, ACallThatReturnsItsArgumentIsSeenThrough) {
  Module identity = module("Identity");
  identity.define("def forward(self, x):\n    return x\n");
  Module m = module("Net");
  m.register_module("conv", conv());
  m.register_module("bn", norm());
  m.register_module("skip", identity);
  m.define(
      "def forward(self, x):\n    return torch.relu(self.skip.forward(self.bn.forward(self.conv.forward(x))) + "
      "self.skip.forward(x))\n");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, {})), (V{"bn-add-act", "conv"}));
  expect_same_numbers(original, m, image());
}

static RewriteOptions regions() {
  RewriteOptions o;
  o.level = tsmem::Level::regions;
  return o;
}

TEST(Regions, OffersAreInTheCodeAndTheReportSaysWhatIsKept) {
  Module m =
      net("def forward(self, x):\n    return torch.cat([torch.relu(self.bn.forward(self.conv.forward(x))), x], 1)\n");
  Module original = reload(m);
  const auto r = rewrite(m, regions());
  EXPECT_EQ(names(r), (V{"bn-act", "cat", "conv"}));
  ASSERT_EQ(r.regions.size(), 1u);
  EXPECT_EQ(r.regions[0].kept, V{"conv: aten::conv2d"});
  EXPECT_EQ(r.regions[0].recomputed, (V{"aten::relu", "aten::cat"}));
  expect_same_numbers(original, m, image());
  EXPECT_EQ(names(rewrite(m, {})), (V{"bn-act", "conv"}));  // level ops knows no cat
}

TEST(Regions, SlopesThatAreParametersOrDrawn) {
  const std::pair<const char*, const char*> spellings[] = {{"torch.prelu(y, self.bn.weight)", "prelu"},
                                                           {"torch.prelu(y, self.bn.weight[0:1])", "prelu"},
                                                           {"torch.glu(y, 1)", "glu"},
                                                           {"torch.glu(y, -3)", "glu"},
                                                           {"torch.rrelu(y, 0.1, 0.3, self.training)", "rrelu"},
                                                           {"torch.rrelu(y)", "rrelu"}};
  for (const auto& [spelling, pattern] : spellings) {
    SCOPED_TRACE(spelling);
    Module m = net(std::string("def forward(self, x):\n    y = self.bn.forward(self.conv.forward(x))\n    return ") +
                   spelling + "\n");
    Module original = reload(m);
    EXPECT_EQ(names(rewrite(m, regions())), (V{"batch-norm", "conv", pattern}));
    FileCheck().check(std::string("tsmem::") + pattern)->run(graph(m));
    expect_same_numbers(original, m, image());
  }
}

TEST(Regions, CrossEntropyKeepsItsInput) {
  for (const char* spelling :
       {"torch.cross_entropy_loss(y, t)", "torch.cross_entropy_loss(y, t, torch.ones_like(y[0, :, 0, 0]), 2, 1)",
        "torch.cross_entropy_loss(y.flatten(2), t.flatten(1), None, 0, -100, 0.1)"}) {
    SCOPED_TRACE(spelling);
    Module m =
        net(std::string("def forward(self, x):\n    y = self.conv.forward(x)\n    t = y.argmax(1)\n    return ") +
            spelling + "\n");
    Module original = reload(m);
    const auto found = names(rewrite(m, regions()));
    EXPECT_NE(std::find(found.begin(), found.end(), "cross-entropy"), found.end());
    FileCheck().check("tsmem::cross_entropy_loss")->run(graph(m));
    expect_same_numbers(original, m, image());
  }
}

// `after`: what is made of the logits [3, 63, 36] and the words [3, 63].
Module language_model(const std::string& after) {
  return net(
      "def forward(self, x):\n"
      "    words = x.flatten(2).mul(5).abs().sum(1).long() % 36\n"
      "    logits = torch.linear(x.flatten(2).transpose(1, 2), self.conv.weight.view(36, 4))\n    " +
      after + "\n");
}

TEST(Regions, ALastLinearLayerAndItsLossAreOne) {
  for (const char* after : {
           "return torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1))",
           "return torch.cross_entropy_loss(logits.view(-1, logits.size(-1)), words.view(-1), None, 2)",
           "return torch.cross_entropy_loss(logits.reshape([189, 36]), words.view(-1), None, 1, 3)",
           "return torch.cross_entropy_loss(logits.flatten(0, 1), words.flatten(), torch.ones_like(logits[0, 0]))",
           "return torch.cross_entropy_loss(logits.flatten(0, 1), words.flatten(), self.bn.weight.repeat(9).detach())",
           "return torch.cross_entropy_loss(logits.transpose(1, 2), words)",
           "return torch.cross_entropy_loss(logits.permute(0, 2, 1), words)",
           "return torch.cross_entropy_loss(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())",
           "return torch.cross_entropy_loss(logits[:, :-1, :].reshape(-1, 36), words[:, 1:].flatten())",
           "return torch.cross_entropy_loss(logits[..., :-1, :].contiguous().view(-1, 36), words[:, 1:].flatten())",
           "return torch.cross_entropy_loss(logits[:, ::2].transpose(-1, -2), words[:, ::2])",
           "wide = logits.float()\n    return torch.cross_entropy_loss(wide.view(-1, wide.size(-1)), words.view(-1))",
           "return torch.cross_entropy_loss(logits.float()[:, :-1].flatten(0, 1), words[:, 1:].flatten())",
           // No rows, or another loss: one operator after the other.
           "return torch.cross_entropy_loss(logits.flatten(1, 2), words[:, 0])",
           "return torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1), None, 0)",
           "return torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1), None, 1, -100, 0.1)",
           "return torch.cross_entropy_loss(logits, torch.softmax(logits.detach(), 1))",
       }) {
    SCOPED_TRACE(after);
    Module m = language_model(after);
    Module original = reload(m);
    const bool one_user =
        !std::string(after).ends_with("logits[0, 0]))") && !std::string(after).ends_with("detach(), 1))");
    EXPECT_EQ(matched(rewrite(m, regions()), "linear-cross-entropy"), one_user);
    if (one_user) FileCheck().check("tsmem::linear_cross_entropy")->check_not("aten::linear")->run(graph(m));
    expect_same_numbers(original, m, image());
  }
}

TEST(Regions, DoesNotTakeLogitsThatOthersSee) {
  for (const char* after : {"return logits, torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1))",
                            "loss = torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1))\n"
                            "    return loss + logits.square().mean()"}) {
    SCOPED_TRACE(after);
    Module m = language_model(after);
    Module original = reload(m);
    const auto report = rewrite(m, regions());
    EXPECT_TRUE(refused(report, "linear-cross-entropy", "other user"));
    EXPECT_TRUE(matched(report, "linear") && matched(report, "cross-entropy"));
    expect_same_numbers(original, m, image());
  }
}

TEST(Regions, DoesNotTakeLogitsWhoseInputIsOverwrittenBeforeTheLoss) {
  Module m = net(R"(
    def forward(self, x):
        h = x.flatten(2).transpose(1, 2).mul(2)
        logits = torch.linear(h, self.conv.weight.view(36, 4))
        h.mul_(3)
        return torch.cross_entropy_loss(logits.view(-1, 36), (h * h).sum(2).long().view(-1) % 36)
  )");
  EXPECT_FALSE(matched(rewrite(m, regions()), "linear-cross-entropy"));
}

TEST(Rewrite, TakesNoLossIntoALayerAtLevelOps) {
  Module m = language_model("return torch.cross_entropy_loss(logits.view(-1, 36), words.view(-1))");
  EXPECT_FALSE(matched(rewrite(m, {}), "linear-cross-entropy"));
}

// As of the tensors that attention takes in several layers' code, and of those that a backbone gives out by name.
TEST(Regions, WhatGoesIntoAListOrADictionaryIsNotWrittenTo) {
  for (const char* after :
       {"l: List[Tensor] = []\n    l.append(y)\n    l.append(x)\n    a, b = l\n    return loss + a.sum() + b.sum()",
        "d: Dict[str, Tensor] = {}\n    if self.training:\n        d['y'] = y\n    return loss, d",
        "l = [x, x]\n    l[0] = y\n    return loss, l"}) {
    SCOPED_TRACE(after);
    Module m = net(std::string("def forward(self, x):\n    y = self.conv.forward(x)\n"
                               "    loss = torch.cross_entropy_loss(y, y.argmax(1))\n    ") +
                   after + "\n");
    const auto found = names(rewrite(m, regions()));
    EXPECT_NE(std::find(found.begin(), found.end(), "cross-entropy"), found.end());
  }
}

TEST(Regions, DoesNotTakeWhatIsOverwrittenByWayOfAList) {
  Module m = net(R"(
    def forward(self, x):
        y = self.conv.forward(x)
        loss = torch.cross_entropy_loss(y, y.argmax(1))
        l: List[Tensor] = []
        l.append(y)
        l[0].mul_(2)
        return loss + y.sum()
  )");
  EXPECT_TRUE(refused(rewrite(m, regions()), "cross-entropy", "writes to an input of the match later"));
}

TEST(Regions, DoesNotTakeACrossEntropyWhoseInputIsOverwritten) {
  Module m = net(R"(
    def forward(self, x):
        y = self.conv.forward(x)
        loss = torch.cross_entropy_loss(y.flatten(2), y.argmax(1).flatten(1))
        y.mul_(2)
        return loss + y.sum()
  )");
  EXPECT_TRUE(refused(rewrite(m, regions()), "cross-entropy", "aten::mul_ writes to an input of the match later"));
}

TEST(Regions, DoesNotTakeAnRreluInPlace) {
  Module m = net("def forward(self, x):\n    return torch.rrelu_(self.conv.forward(x), 0.1, 0.3, True)\n");
  EXPECT_EQ(names(rewrite(m, regions())), V{"conv"});
}

TEST(Regions, AnOverwriteAfterABranchIsTaken) {
  Module m = net(R"(
    def forward(self, x, flag: bool):
        z = self.bn.forward(self.conv.forward(x))
        if flag:
            z += x
        return torch.relu(z)
  )");
  Module original = reload(m);
  const auto found = names(rewrite(m, regions()));
  EXPECT_TRUE(std::find(found.begin(), found.end(), "add") != found.end());
  for (bool flag : {false, true}) expect_same_numbers(original, m, {at::randn({3, 4, 9, 7}), flag});
}

TEST(Regions, DoesNotTakeAnOverwriteThatTheOtherBranchesReaderSeesLater) {
  Module m = net(R"(
    def forward(self, x, flag: bool):
        z = self.bn.forward(self.conv.forward(x))
        y = z
        if flag:
            y = z.add_(x)
        return y, z
  )");
  const auto r = rewrite(m, regions());
  EXPECT_TRUE(refused(r, "add", "uses too"));
}

// Nothing may be recomputed from a tensor that is overwritten later.
TEST(Regions, WhatIsMadeFromATensorThatIsWrittenToIsKept) {
  Module m = net(R"(
    def forward(self, x):
        a = self.conv.forward(x)
        b = self.conv.forward(x + 1)
        z = self.bn.forward(torch.cat([a, b], 0))
        w = torch.cat([b, x], 0)
        a.add_(1.0)
        return torch.relu(z), w, a
  )");
  const auto r = rewrite(m, regions());
  EXPECT_TRUE(matched(r, "cat"));
  const std::string text = graph(m);
  FileCheck().check_count("tsmem::cat", 2, /*exactly=*/true)->run(text);
  std::vector<int64_t> recompute;
  for (auto* n : m.get_method("forward").graph()->nodes())
    if (n->kind() == c10::Symbol::fromQualString("tsmem::cat"))
      recompute.push_back(torch::jit::toIValue(n->inputs().back())->toInt());
  EXPECT_EQ(recompute, (std::vector<int64_t>{0, 1}));
}

// What a detector's search finds and its table of anchors are no norm's weight, unless one of that name is set.
TEST(Regions, WritesToWhatIsNewAreNoneToOtherAttributesThanThoseSet) {
  for (const auto& [table, recompute] : {std::pair{"anchors", 1}, std::pair{"weight", 0}}) {
    SCOPED_TRACE(table);
    Module m = module("Net");
    m.register_module("conv", conv());
    m.register_module("bn", norm());
    m.register_buffer(table, at::zeros({3}));
    m.define(fmt::format(R"(
    def forward(self, x):
        z = torch.relu(self.bn.forward(self.conv.forward(x)))
        best, places = torch.max(z.flatten(1), 1)
        found: List[Tensor] = []
        found.append(places)
        places[places < 2] = 0
        scores = torch.zeros_like(best)
        found.append(scores)
        scores[0:1].copy_(best[0:1])
        self.{} = torch.full([3], 1.0)
        return z, found
  )",
                         table));
    Module original = reload(m);
    EXPECT_TRUE(matched(rewrite(m, regions()), "bn-act"));
    for (auto* n : m.get_method("forward").graph()->nodes()) {
      if (n->kind() != c10::Symbol::fromQualString("tsmem::batch_norm_act")) continue;
      EXPECT_EQ(torch::jit::toIValue(n->inputs().back())->toInt(), recompute);
    }
    expect_same_numbers(original, m, image());
  }
}

// A norm's statistics, which it writes to, are not the bias that a layer does without.
TEST(Regions, WhatIsNoneSharesNoMemory) {
  Module m = module("Net");
  m.register_module("bn", norm());
  m.register_parameter("scale", at::ones({7}), false);
  m.register_attribute("shift", c10::OptionalType::ofTensor(), c10::IValue());
  m.define(R"(
    def forward(self, x):
        return self.bn.forward(torch.layer_norm(torch.relu(x), [7], self.scale, self.shift))
  )");
  EXPECT_TRUE(matched(rewrite(m, regions()), "layer-norm"));
  for (auto* n : m.get_method("forward").graph()->nodes()) {
    if (n->kind() != c10::Symbol::fromQualString("tsmem::layer_norm")) continue;
    EXPECT_EQ(torch::jit::toIValue(n->inputs().back())->toInt(), 1);
  }
}

// A detector's labels are new memory, made from features that went through lists: what is written to them changes no
// feature. A write to a part of the feature itself does.
TEST(Regions, WhatIsNewIsNotWhatWasThereBefore) {
  for (const auto& [written, recompute] :
       {std::pair{"(places >= 2).to(z.dtype)", 1}, std::pair{"torch.stack([best, best])", 1},
        std::pair{"best.floor()", 1}, std::pair{"h.flatten(1)[:, 0]", 0}}) {
    SCOPED_TRACE(written);
    Module m = module("Net");
    m.register_module("conv", conv());
    m.register_module("bn", norm());
    m.define(fmt::format(R"(
    def forward(self, x):
        h = self.conv.forward(x)
        z = torch.relu(self.bn.forward(h))
        features: Dict[str, Tensor] = {{}}
        features["0"] = z
        labels: List[Tensor] = []
        for feature in list(features.values()):
            best, places = torch.max(feature.detach().flatten(1), 1)
            found = {}
            found.mul_(0.5)
            labels.append(found)
        return z, labels
  )",
                         written));
    Module original = reload(m);
    const auto report = rewrite(m, regions());
    EXPECT_TRUE(matched(report, "bn-act"));
    for (auto* n : m.get_method("forward").graph()->nodes())
      if (n->kind() == c10::Symbol::fromQualString("tsmem::batch_norm_act"))
        EXPECT_EQ(torch::jit::toIValue(n->inputs().back())->toInt(), recompute);
    if (recompute) {
      expect_same_numbers(original, m, image());
      continue;
    }
    const auto norm =
        std::find_if(report.matches.begin(), report.matches.end(), [](const auto& f) { return f.pattern == "bn-act"; });
    EXPECT_EQ(norm->overwritten_by, "aten::mul_");
  }
}

// These may give their argument, or a view of it, and their schemas don't say so.
TEST(Regions, SeesThroughWhatGivesItsArgument) {
  for (const char* given : {"torch.dropout(h, 0.5, self.training)", "torch.type_as(h, x)",
                            "torch.einsum('ncwh->nchw', [h])", "torch.sum_to_size(h, h.size())", "torch.atleast_3d(h)",
                            "torch.broadcast_tensors([h, x])[0]", "torch.unsafe_chunk(h, 1)[0]",
                            "torch.dropout(torch.type_as(h, x), 0.5, self.training).permute([0, 1, 3, 2])"}) {
    Module linear = net(fmt::format(R"(
    def forward(self, x):
        h = torch.tanh(x)
        y = torch.linear({}, self.conv.weight.flatten(1))
        h.view([-1]).sub_(1.0)
        return y, h
    )",
                                    given));
    EXPECT_TRUE(refused(rewrite(linear, regions()), "linear", "later")) << given;
    Module in_place = net(fmt::format(R"(
    def forward(self, x):
        h = self.conv.forward(x)
        y = {}
        return torch.relu_(h), y
    )",
                                      given));
    EXPECT_TRUE(refused(rewrite(in_place, regions()), "activation", "uses too")) << given;
  }
}

// Where it drops nothing, PyTorch's own gives a tensor of its own where it is differentiated.
// TorchScript's derivative of a dropout beside another operator makes a tensor; alone the dropout may give its
// argument.
TEST(Regions, TakesADropoutOfWhichAViewIsOverwrittenOnlyWhereTorchScriptDifferentiatesIt) {
  const auto after = [](const std::string& argument) {
    return net("def forward(self, x):\n    y = torch.dropout(" + argument +
               ", 0.5, self.training)\n    y.view([-1]).sub_(1.0)\n    return y\n");
  };
  Module beside = after("torch.tanh(x)"), alone = after("x");
  EXPECT_TRUE(matched(rewrite(beside, regions()), "dropout"));
  EXPECT_TRUE(refused(rewrite(alone, regions()), "dropout", "it is overwritten"));
}

// As nn.InstanceNorm2d is scripted, behind a convolution of which TorchScript doesn't know the dimensions.
TEST(Regions, TakesAnOverwriteOfAViewThatNobodyElseReads) {
  const auto two_ways = [](const std::string& given) {
    return net(
        "def forward(self, x):\n    h = torch.tanh(self.conv.forward(x))\n    if h.dim() == 3:\n"
        "        w = torch.instance_norm(h.unsqueeze(0), None, None, None, None, True, 0.1, 1e-5, True)\n"
        "        y = w.squeeze(0)\n    else:\n"
        "        w = torch.instance_norm(h, None, None, None, None, True, 0.1, 1e-5, True)\n        y = w\n"
        "    z = torch.relu_(y)\n    return " +
        given + "\n");
  };
  Module m = two_ways("z * 2"), original = reload(m), seen = two_ways("z * w"), as_written = reload(seen);
  EXPECT_TRUE(matched(rewrite(m, regions()), "activation"));
  expect_same_numbers(original, m, image());
  EXPECT_FALSE(matched(rewrite(seen, regions()), "activation"));
  expect_same_numbers(as_written, seen, image());
}

// What is overwritten is read by its old name afterwards: the operator's result is the same tensor.
TEST(Rewrite, TakesWhatOverwritesATensorThatIsReadLater) {
  for (const std::string code :
       {"h = self.conv.forward(x)\n    torch.relu_(h)\n    return torch.tanh(h)\n",
        "h = self.conv.forward(x)\n    y = torch.relu_(h)\n    return y + h\n",
        "h = self.conv.forward(x)\n    y = torch.relu_(h)\n    return torch.cat([h, self.bn.forward(y)], 1)\n",
        "h = self.bn.forward(self.conv.forward(x))\n    torch.relu_(h)\n    return h * 2, h\n",
        "h = self.conv.forward(x)\n    torch.relu_(h)\n    for i in range(2):\n        h = h + torch.tanh(h)\n"
        "    return h\n",
        "h = self.conv.forward(x)\n    torch.relu_(h)\n    if h.dim() == 4:\n        h.mul_(2.0)\n    else:\n"
        "        h = h * 3\n    return h\n",
        "h = self.conv.forward(x)\n    torch.leaky_relu_(h, 0.5)\n    h.add_(1.0)\n    torch.relu_(h)\n"
        "    return h.view([-1]), h\n",
        "h = self.conv.forward(x)\n    h += self.conv.forward(x)\n    torch.relu_(h)\n    return torch.tanh(h)\n",
        "h = self.conv.forward(x)\n    y = torch.relu_(h)\n    pair = (h, y)\n    return pair[0] * pair[1], h\n",
        "h = self.conv.forward(x)\n    pair = (h, x)\n    y = torch.relu_(h)\n    return pair[0] * y * h\n",
        "h = self.conv.forward(x)\n    torch.relu_(h)\n    return [h, h * 2], {\"h\": h}\n",
        "h = self.conv.forward(x)\n    if x.size(0) > 1:\n        g = self.conv.forward(x)\n        torch.relu_(g)\n"
        "        h = g + h * g\n    else:\n        torch.relu_(h)\n        h = torch.tanh(h)\n    return h\n",
        "h = x\n    for i in range(3):\n        h = self.conv.forward(x) + h.mean()\n        torch.relu_(h)\n"
        "        h = torch.tanh(h)\n    return h\n"}) {
    Module m = net("def forward(self, x):\n    " + code), original = reload(m);
    const auto report = rewrite(m, regions());
    EXPECT_TRUE(matched(report, "activation") || matched(report, "bn-act")) << code;
    expect_same_numbers(original, m, image());
  }
}

// What reads it later has it through a branch, or a call, that does nothing with it.
TEST(Rewrite, TakesWhatIsReadThroughABranchThatIsNotTaken) {
  for (const std::string code :
       {"h = self.conv.forward(x)\n    torch.relu_(h)\n    if self.skips():\n        h = h + x.mean()\n    return "
        "torch.tanh(h)\n",
        "h = self.conv.forward(x)\n    k = h\n    if self.skips():\n        h = h + x.mean()\n    torch.relu_(h)\n"
        "    return torch.tanh(h) * k\n",
        "h = self.conv.forward(x)\n    torch.relu_(h)\n    return torch.tanh(self.passes(h)) + h\n",
        "h = self.conv.forward(x)\n    z = self.bn.forward(self.conv.forward(x))\n    torch.relu_(h)\n    if z.dim() "
        "== 3:\n"
        "        h = h.unsqueeze(0)\n    return torch.tanh(h) * z\n"}) {
    Module m =
        net("def skips(self) -> bool:\n    return False\n\n"
            "def passes(self, x):\n    if self.skips():\n        x = x + 1\n    return x\n\n"
            "def forward(self, x):\n    " +
            code);
    Module original = reload(m);
    EXPECT_TRUE(matched(rewrite(m, regions()), "activation")) << code;
    expect_same_numbers(original, m, image());
  }
}

// In a module, as in pix2pix's U-Net: its caller reads the argument afterwards.
TEST(Rewrite, TakesAnActivationThatOverwritesAnArgument) {
  Module act = module("Act"), block = module("Block"), m = module("Net");
  act.define("def forward(self, x):\n    return torch.leaky_relu_(x, 0.1)\n");
  block.register_module("act", act);
  block.register_module("conv", conv());
  block.register_module("bn", norm());
  block.define(
      "def forward(self, x):\n    y = self.bn.forward(self.conv.forward(self.act.forward(x)))\n"
      "    return torch.cat([x, y], 1)\n");
  m.register_module("conv", conv());
  m.register_module("block", block);
  m.define("def forward(self, x):\n    return torch.tanh(self.block.forward(self.conv.forward(x)))\n");
  Module original = reload(m), alone = reload(block);
  rewrite(m, regions());
  FileCheck().check("tsmem::act")->check("tsmem::cat")->check_not("aten::leaky_relu_")->run(graph(m));
  expect_same_numbers(original, m, image());
  Module rewritten = reload(alone);
  EXPECT_TRUE(refused(rewrite(rewritten, regions()), "activation", "may be seen from elsewhere"));
}

// A method overwrites what it has made, and gives it out by its old name: its callers read the result.
TEST(Rewrite, TakesAnOverwriteOfWhatIsReturned) {
  Module block = module("Block"), m = module("Net");
  block.register_module("conv", conv());
  block.define("def forward(self, x):\n    h = self.conv.forward(x)\n    torch.relu_(h)\n    return h\n");
  m.register_module("block", block);
  m.define("def forward(self, x):\n    h = self.block.forward(x)\n    return torch.tanh(h) * self.block.forward(h)\n");
  Module original = reload(m);
  EXPECT_TRUE(matched(rewrite(m, regions()), "activation"));
  expect_same_numbers(original, m, image());
}

// One operator stands where the last of several did: dead code before it would overwrite what the first one read.
TEST(Rewrite, LeavesOperatorsAroundDeadCodeThatOverwritesWhatTheyRead) {
  for (const std::string dead : {"h.mul_(2.0)", "torch.relu_(h)", "h = h.add_(0.5)"}) {
    Module m =
        net("def forward(self, x):\n    h = self.conv.forward(x)\n"
            "    y = self.bn.forward(self.conv.forward(x)) + h\n    " +
            dead + "\n    return torch.relu(y)\n");
    Module original = reload(m);
    const auto report = rewrite(m, regions());
    EXPECT_FALSE(matched(report, "bn-add-act")) << dead;
    EXPECT_TRUE(refused(report, "bn-add-act", "result is not used writes to an input")) << dead;
    expect_same_numbers(original, m, image());
  }
}

// What is overwritten has other names: another operator's result in place, a list, a dictionary, a dropout that gives
// its argument.
TEST(Rewrite, LeavesAnOverwriteThatOthersSee) {
  for (const std::string code :
       {"h = self.conv.forward(x)\n    if x.size(0) > 1:\n        torch.relu_(h)\n    return torch.tanh(h)\n",
        "h = self.conv.forward(x)\n    y = h.add_(1.0)\n    torch.relu_(h)\n    return torch.tanh(y)\n",
        "h = self.conv.forward(x)\n    y = h.add_(1.0)\n    torch.relu_(y)\n    return torch.tanh(h)\n",
        "h = self.conv.forward(x)\n    y = h.mul_(-2.0)\n    torch.leaky_relu_(h, 0.1)\n    return torch.tanh(y) * h\n",
        "h = self.conv.forward(x)\n    v = h.view([-1])\n    torch.relu_(h)\n    return v * 2, h\n",
        "h = self.conv.forward(x)\n    pair = [h]\n    y = torch.relu_(h)\n    return torch.cat(pair, 0) * y\n",
        "h = self.conv.forward(x)\n    pair = [h, x]\n    y = torch.relu_(h)\n    return pair[0] * y\n",
        "h = self.conv.forward(x)\n    named = {\"h\": h}\n    y = torch.relu_(h)\n    return named[\"h\"] * y\n",
        "h = self.conv.forward(x)\n    v = torch.dropout(h, 0.0, self.training)\n    torch.relu_(v)\n    return v * 1, "
        "h\n",
        "h = self.conv.forward(x)\n    v = torch.dropout(h, 0.5, False)\n    torch.relu_(v)\n    return v * 1, h\n",
        "h = self.conv.forward(x)\n    v = torch.dropout(h, 0.5, False)\n    y = torch.relu_(h)\n    return v * y\n",
        "h = self.conv.forward(x)\n    for i in range(2):\n        torch.relu_(h)\n    return h * 2\n"}) {
    Module m = net("def forward(self, x):\n    " + code), original = reload(m);
    EXPECT_FALSE(matched(rewrite(m, regions()), "activation")) << code;
    expect_same_numbers(original, m, image());
  }
}

// A branch that is not taken reads nothing.
TEST(Rewrite, TakesAnOverwriteOfWhatAnotherBranchReads) {
  Module m =
             net("def forward(self, x):\n    y = self.bn.forward(self.conv.forward(x))\n    if x.size(0) > 7:\n"
                 "        z = y\n    else:\n        z = torch.cat([y, x], 1)\n    return torch.relu_(z) * 2\n"),
         seen =
             net("def forward(self, x):\n    y = self.bn.forward(self.conv.forward(x))\n    if x.size(0) > 7:\n"
                 "        z = y\n    else:\n        z = torch.cat([y, x], 1)\n    return torch.relu_(z) * 2, y\n");
  Module original = reload(m), as_written = reload(seen);
  EXPECT_TRUE(matched(rewrite(m, regions()), "activation"));
  expect_same_numbers(original, m, image());
  EXPECT_FALSE(matched(rewrite(seen, regions()), "activation"));
  expect_same_numbers(as_written, seen, image());
}

// Its result would be dense, and what comes after it may ask for the strides.
TEST(Regions, LeavesADropoutThatOverwritesAView) {
  for (const char* view : {"torch.slice(h, 1, 0, 2)", "torch.relu_(torch.slice(h, 1, 0, 2))"}) {
    Module m = net(fmt::format(
        "def forward(self, x):\n    h = torch.tanh(x)\n    return torch.dropout_({}, 0.5, self.training)\n", view));
    Module original = reload(m);
    EXPECT_TRUE(refused(rewrite(m, regions()), "dropout", "overwrites a view")) << view;
    expect_same_numbers(original, m, image());
  }
  Module whole = net("def forward(self, x):\n    return torch.dropout_(torch.tanh(x), 0.5, self.training)\n");
  EXPECT_TRUE(matched(rewrite(whole, regions()), "dropout"));
}

// MONAI's blocks: an instance norm, a dropout of nothing, and an activation in place. Where TorchScript differentiates
// the dropout, as it does behind a batch norm, it makes a tensor and draws.
TEST(Regions, ADropoutOfNothingThatIsOverwrittenIsItsArgument) {
  const auto block = [](const std::string& p, const std::string& norm_of) {
    Module drop = module("Drop");
    drop.define("def forward(self, x):\n    return torch.dropout(x, " + p + ", self.training)\n");
    Module m = module("Net");
    m.register_module("conv", conv());
    m.register_module("bn", norm());
    m.register_module("drop", drop);
    m.define("def forward(self, x):\n    y = self.drop.forward(" + norm_of +
             ")\n    return torch.dropout(torch.leaky_relu_(y, 0.1), 0.5, True)\n");
    return m;
  };
  const std::string instance =
                        "torch.instance_norm(self.conv.forward(x), None, None, None, None, True, 0.1, 1e-5, True)",
                    batch = "self.bn.forward(self.conv.forward(x))";
  Module m = block("0.0", instance), original = reload(m);
  rewrite(m, regions());
  FileCheck().check("\"leaky_relu\"")->check("tsmem::instance_norm_act")->check_not("aten::leaky_relu_")->run(graph(m));
  expect_same_numbers(original, m, image());
  Module drops = block("0.5", instance), as_it_drops = reload(drops);
  rewrite(drops, regions());
  FileCheck()
      .check("tsmem::instance_norm_act")
      ->check("tsmem::dropout")
      ->check("\"leaky_relu\"")
      ->check("tsmem::act")
      ->check_not("aten::leaky_relu_")
      ->run(graph(drops));
  expect_same_numbers(as_it_drops, drops, image());
  Module beside = block("0.0", batch), as_written = reload(beside);
  EXPECT_FALSE(matched(rewrite(beside, regions()), "bn-act"));
  FileCheck().check("tsmem::dropout")->run(graph(beside));
  expect_same_numbers(as_written, beside, image());
}

// LibTorch's alias analysis takes all that has been in a tuple or a list for one tensor.
TEST(Regions, WritesAfterATupleReachWhatHasTheMemory) {
  const auto after = [](const std::string& write) {
    return net(
        "def forward(self, x):\n"
        "    a, b = torch.chunk(self.conv.forward(x), 2, 1)\n"
        "    if x.size(0) > 1:\n        pair = (a, b)\n    else:\n        pair = (b, a.transpose(2, 3))\n"
        "    q, k = pair\n"
        "    y = torch.matmul(q, k)\n"
        "    other = (torch.zeros_like(y), x)\n"
        "    if x.size(0) > 2:\n        fresh, seen = other\n    else:\n        fresh, seen = (torch.ones_like(y), "
        "x)\n" +
        write + "    return self.bn.forward(torch.cat([y, y + fresh], 1))\n");
  };
  for (const char* write : {"    fresh.add_(1.0)\n", "    fresh.view([-1]).mul_(y.mean())\n", ""}) {
    SCOPED_TRACE(write);
    Module m = after(write);
    Module original = reload(m);
    EXPECT_TRUE(matched(rewrite(m, regions()), "attention"));
    expect_same_numbers(original, m, {at::randn({3, 4, 5, 5})});
  }
  for (const char* write : {"    q.add_(1.0)\n", "    a.add_(1.0)\n", "    b.select(1, 0).zero_()\n",
                            "    if self.training:\n        k.t_() if k.dim() == 2 else k.mul_(2.0)\n"}) {
    SCOPED_TRACE(write);
    Module m = after(write);
    const auto r = rewrite(m, regions());
    EXPECT_FALSE(matched(r, "attention"));
    EXPECT_TRUE(refused(r, "attention", "writes to an input of the match later"));
  }
}

TEST(Regions, DoesNotTakeASumOfWhatIsNotMadeAgain) {
  Module m = net("def forward(self, x):\n    return self.conv.forward(x) + x\n");
  EXPECT_EQ(names(rewrite(m, regions())), V{"conv"});
}

TEST(Regions, AttentionAndItsCopies) {
  Module m = net(R"(
    def forward(self, x):
        n, c, h, w = x.shape
        q = self.conv.forward(x).reshape([n, 2, c // 2, h * w]).transpose(2, 3)
        y = torch.scaled_dot_product_attention(q, q, q * 0.5)
        p = torch.softmax(torch.matmul(y, q.transpose(2, 3)), -1)
        z = torch.matmul(p, y).transpose(1, 2).contiguous().view([n, h * w, c])
        return torch.roll(z, [1], [1]).transpose(1, 2).reshape([n, c, h, w])
  )");
  Module original = reload(m);
  const auto found = names(rewrite(m, regions()));
  // The first reshape is a view of what the convolution has made.
  EXPECT_EQ(std::count(found.begin(), found.end(), "copies"), 3);
  EXPECT_EQ(std::count(found.begin(), found.end(), "attention"), 3);
  EXPECT_EQ(std::count(found.begin(), found.end(), "softmax"), 1);
  expect_same_numbers(original, m, image());
  const auto without = names(rewrite(m, {}));  // at level ops they would save nothing
  for (const char* name : {"attention", "softmax", "copies"})
    EXPECT_EQ(std::count(without.begin(), without.end(), name), 0);
}

TEST(Regions, ACopyOfWhatRunsAgain) {
  Module m = net(R"(
    def forward(self, x):
        y = torch.cat([self.conv.forward(x), x], 1)
        return torch.conv2d(y.contiguous(), torch.ones([2, y.size(1), 1, 1]), None)
  )");
  Module original = reload(m);
  EXPECT_TRUE(matched(rewrite(m, regions()), "copies"));
  expect_same_numbers(original, m, image());
}

TEST(Regions, DoesNotTakeACopyOfWhatIsNotMadeAgain) {
  Module m = net("def forward(self, x):\n    return self.conv.forward(self.conv.forward(x).contiguous())\n");
  EXPECT_EQ(names(rewrite(m, regions())), (V{"conv"}));
}

TEST(Regions, LayersMayRunAgainWhereTheyAreFirst) {
  const std::string body = "def forward(self, x):\n    return torch.relu(self.conv.forward(x))\n";
  Module m = net(body);
  rewrite(m, regions());
  std::string text = graph(m.attr("conv").toModule());
  const auto last = [&] {
    const size_t call = text.find("tsmem::conv2d("), end = text.find(')', call), comma = text.rfind(',', end);
    const std::string name = text.substr(comma + 2, end - comma - 2);
    return text.find(name + " : int = prim::Constant[value=3]") != std::string::npos;
  };
  EXPECT_TRUE(last()) << text;
  m = net(body);
  rewrite(m, {});  // level ops
  text = graph(m.attr("conv").toModule());
  EXPECT_FALSE(last()) << text;
}

TEST(Regions, ASumOfNormsOfInstancesIsMadeAgain) {
  Module m = net(R"(
    def forward(self, x):
        n = torch.instance_norm(self.conv.forward(x), None, None, None, None, True, 0.1, 1e-5, False)
        return n + x
  )");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, regions())), (V{"add", "conv", "instance-norm"}));
  expect_same_numbers(original, m, image());
}

TEST(Regions, ChainsOfElementwiseOperators) {
  Module m = net(R"(
    def forward(self, x):
        y = torch.relu(self.bn.forward(self.conv.forward(x)))
        d = y - torch.mean(y, [1], True)
        v = torch.mean(torch.pow(d, 2), [1], True)
        z = d * torch.rsqrt(v + 0.1)
        z = torch.where(z > 0, z, -z) / 2
        z = torch.rsub(z.masked_fill_(z > 2, 0.5), 1.5)
        z = torch.clamp(z, -1., 1.).to(7).type_as(x)
        z = torch.exp(z).div_(torch.sqrt(torch.abs(z) + 1))
        return self.conv.forward(torch.pad(torch.flip(z, [3]), [1, 2]))
  )");
  Module original = reload(m);
  const auto r = rewrite(m, regions());
  const std::string text = graph(m);
  for (const char* op : {"sub", "pow", "rsqrt", "where", "neg", "div", "rsub", "clamp", "to", "type_as", "exp", "sqrt",
                         "abs", "constant_pad_nd", "flip", "add"})
    EXPECT_NE(text.find(std::string("tsmem::") + op + "("), std::string::npos) << op << text;
  EXPECT_EQ(text.find("aten::div"), std::string::npos);
  expect_same_numbers(original, m, image());
  Module ops = reload(original);
  EXPECT_FALSE(matched(rewrite(ops, {}), "pointwise"));  // at level ops they would save nothing
}

TEST(Rewrite, TransformsOfRealTensors) {
  for (const std::string code :
       {"torch.fft_rfft(y)", "torch.fft_fft(y, 8, 2)", "torch.fft_rfft2(y, None, [1, 2])", "torch.fft_rfftn(y)",
        "torch.stft(y.flatten(1), 16, 4, None, None, True, 'reflect', False, True, True)"}) {
    Module m =
        net("def forward(self, x):\n    y = self.conv.forward(x)\n    return torch.view_as_real(" + code + ")\n");
    Module original = reload(m);
    EXPECT_TRUE(matched(rewrite(m, {}), "shape-only")) << code;
    expect_same_numbers(original, m, image());
  }
  Module back = net(
      "def forward(self, x):\n    return torch.fft_irfft(torch.view_as_complex(self.conv.forward(x)[:, :, :, :2]))\n");
  EXPECT_EQ(names(rewrite(back, {})), V{"conv"});  // keeps nothing itself
}

TEST(Regions, LookUpsAndInterpolation) {
  Module m = net(R"(
    def forward(self, x):
        y = self.conv.forward(x)
        i = torch.tensor([2, 0, 1, 1])
        a = y[:, i] + torch.index_select(y, 1, i)
        b = torch.gather(y, 1, torch.zeros_like(y).to(4)) * y.repeat([1, 1, 1, 1])
        return torch.upsample_nearest2d(a * b, None, [2., 2.])
  )");
  Module original = reload(m);
  const auto found = names(rewrite(m, regions()));
  EXPECT_EQ(std::count(found.begin(), found.end(), "lookup"), 5) << graph(m);
  expect_same_numbers(original, m, image());
}

TEST(Regions, DoesNotTakeElementwiseOperatorsOfWhatIsNotMadeAgain) {
  Module m = net("def forward(self, x):\n    return self.conv.forward(torch.exp(x)) - x\n");
  EXPECT_EQ(names(rewrite(m, regions())), V{"conv"});
  m = net("def forward(self, x):\n    return self.conv.forward(torch.tanh(x) * torch.sigmoid(x))\n");
  EXPECT_EQ(names(rewrite(m, regions())), (V{"conv", "mul"}));
}

TEST(Regions, TakesGatesOfWhatIsMadeAgain) {
  Module m =
      net("def forward(self, x):\n    y = torch.neg(self.bn.forward(self.conv.forward(x)))\n"
          "    return self.conv.forward(torch.tanh(y) * torch.sigmoid(y - 1))\n");
  Module original = reload(m);
  const auto found = names(rewrite(m, regions()));
  EXPECT_EQ(std::count(found.begin(), found.end(), "pointwise"), 4) << graph(m);
  EXPECT_NE(graph(m).find("tsmem::tanh"), std::string::npos);
  EXPECT_NE(graph(m).find("tsmem::sigmoid"), std::string::npos);
  expect_same_numbers(original, m, image());
}

TEST(Regions, TakesElementwiseOperatorsOfWhatIsKeptAnyway) {
  using V = std::vector<std::string>;
  const auto found = [](const std::string& made) {
    Module m = net("def forward(self, x):\n    y = self.conv.forward(x)\n    return self.conv.forward(" + made + ")\n");
    Module original = reload(m);
    const V all = names(rewrite(m, regions()));
    expect_same_numbers(original, m, image());
    return all;
  };
  EXPECT_EQ(found("y / torch.norm(y, 2., [1], True)"), (V{"conv", "pointwise"}));  // it keeps both itself
  EXPECT_EQ(found("y * self.conv.forward(x)"), (V{"conv", "mul"}));
  const V neg = found("torch.neg(y)) + torch.silu(self.bn.forward(y)");  // the norm keeps y
  EXPECT_EQ(std::count(neg.begin(), neg.end(), "pointwise"), 1);
  // Nothing of ours keeps y: not what divides by a number, nor a copy, nor the one that keeps its result, nor one that
  // stays.
  for (const char* made :
       {"y / 2.", "torch.neg(y)", "torch.exp(y)", "torch.sigmoid(y)", "y + self.conv.forward(x)", "y + x",
        "torch.neg(y)) + torch.logsumexp(y, [1], True", "torch.stack([y, self.conv.forward(x)])[0]",
        "y.mul_(torch.logsumexp(y.detach(), [1], True))", "y.sub_(torch.mean(y, [1], True))",
        "y + torch.amax(y, [1], True)"})
    for (const std::string& name : found(made))
      EXPECT_TRUE(name == "conv" || name == "lookup") << name << " in " << made;
  const V sampled = found("y + torch.grid_sampler(y, y[:, :2].permute(0, 2, 3, 1), 0, 0, False)");
  EXPECT_EQ(std::count(sampled.begin(), sampled.end(), "add"), 0);
  // Beside what is overwritten, the other operand gains where the operator keeps it.
  const std::string gate = "(torch.neg(self.bn.forward(self.conv.forward(x))))";
  const V sum = found("y.add_" + gate), product = found("y.mul_" + gate);
  EXPECT_EQ(std::count(sum.begin(), sum.end(), "add"), 0);
  EXPECT_EQ(std::count(product.begin(), product.end(), "mul"), 1);
}

TEST(Rewrite, TakesATracedConvolutionOfANamedPadding) {
  for (const char* padding : {"same", "valid"}) {
    Module m = net(
        "def forward(self, x):\n    return torch.tanh(torch._convolution_mode(x, self.conv.weight, None, [1, 1], '" +
        std::string(padding) + "', [1, 1], 1))\n");
    Module original = reload(m);
    const auto found = names(rewrite(m, {}));
    EXPECT_EQ(std::count(found.begin(), found.end(), "conv"), 1) << graph(m);
    expect_same_numbers(original, m, image());
  }
}

TEST(Regions, DoesNotTakeArithmeticOfNumbers) {
  Module m =
      net("def forward(self, x):\n    n = -(abs(x.size(0) - 3) // 2) + 2 ** x.size(1)\n    k = float(n) / 2. - 1.\n"
          "    return torch.relu(self.conv.forward(x)) * k\n");
  Module original = reload(m);
  const auto r = rewrite(m, regions());
  EXPECT_EQ(names(r), (V{"activation", "conv", "pointwise"}));
  EXPECT_TRUE(r.refused.empty());
  expect_same_numbers(original, m, image());
}

TEST(Regions, DoesNotTakeAnElementwiseOverwriteOfWhatOthersSee) {
  Module m =
      net("def forward(self, x):\n    y = torch.relu(self.conv.forward(x))\n    v = y.view([-1])\n    z = y.div_(2.)\n"
          "    return z.view([-1]) + v\n");
  const auto r = rewrite(m, regions());
  EXPECT_FALSE(matched(r, "pointwise"));
  EXPECT_TRUE(refused(r, "pointwise", "uses too"));
}

TEST(Regions, AParameterIsThereAnyway) {
  Module m = net(R"(
    def forward(self, x):
        w = self.conv.weight
        w = (w - torch.mean(w, [1, 2, 3], True)) / torch.std(w, [1, 2, 3], True, True)
        return torch.conv2d(x, w)
  )");
  Module original = reload(m);
  EXPECT_EQ(names(rewrite(m, regions())), (V{"conv", "pointwise", "pointwise", "pointwise"}));
  expect_same_numbers(original, m, image());
}

TEST(Checkpoint, WrapsTheCallsAndIsUndone) {
  Module block =
      net("def forward(self, x, k: int):\n    return torch.relu(self.bn.forward(self.conv.forward(x))) * k, k\n");
  Module m = module("Outer");
  m.register_module("block", block);
  m.define("def forward(self, x):\n    y, k = self.block.forward(x, 2)\n    return y + k\n");
  Module original = reload(m);
  RewriteOptions o = regions();
  o.checkpoint = {"block"};
  const auto r = rewrite(m, o);
  FileCheck().check("tsmem::checkpoint")->check_not("prim::CallMethod")->run(graph(m));
  EXPECT_EQ(r.regions[0].module, "block");
  EXPECT_EQ(r.regions[0].kept, V{"its arguments"});
  expect_same_numbers(original, m, image());
  EXPECT_TRUE(tsmem::restore(m));
  FileCheck().check("prim::CallMethod")->check_not("tsmem::")->run(graph(m));
  expect_same_numbers(original, m, image());
}

TEST(Checkpoint, ResultsShareMemoryAsTheyDid) {
  Module block =
      net("def forward(self, x):\n    y = self.conv.forward(x)\n    return x, y, y[:, 1:3], self.bn.running_mean\n");
  Module m = module("Outer");
  m.register_module("block", block);
  m.define(R"(
    def forward(self, x):
        x = x * 2
        a, y, v, mean = self.block.forward(x)
        v.mul_(3.0)
        return a + 1, y, v.sum(), mean
  )");
  Module original = reload(m);
  RewriteOptions o = regions();
  o.checkpoint = {"block"};
  rewrite(m, o);
  expect_same_numbers(original, m, image());
}

TEST(Checkpoint, ChangesOfTheModelsListsAreRefused) {
  Module block = module("Block");
  block.register_attribute("seen", c10::ListType::ofTensors(), c10::List<at::Tensor>());
  block.define("def forward(self, x):\n    self.seen.append(x)\n    return torch.relu(x)\n");
  Module m = module("Outer");
  m.register_module("block", block);
  m.define("def forward(self, x):\n    return self.block.forward(x + 1)\n");
  RewriteOptions o;
  o.checkpoint = {"block"};
  EXPECT_THROW(rewrite(m, o), tsmem::Error);
}

TEST(Checkpoint, WhatCannotRunAgainIsRefused) {
  Module block = net("def forward(self, x):\n    return self.conv.forward(x.mul_(2))\n");
  Module m = module("Outer");
  m.register_module("block", block);
  m.define("def forward(self, x):\n    return self.block.forward(x + 1)\n");
  RewriteOptions o;
  o.checkpoint = {"block"};
  EXPECT_THROW(rewrite(m, o), tsmem::Error);
  o.checkpoint = {"blocks"};
  EXPECT_THROW(rewrite(m, o), tsmem::Error);
}

// What TorchScript's own derivative draws with p = 0 depends on the neighbours, and so on the place of the call.
TEST(Rewrite, OneDropoutClassInTwoPlaces) {
  Module drop = module("Drop");
  drop.define("def forward(self, x):\n    return torch.dropout(x, 0.0, self.training)\n");
  Module m = module("Net");
  m.register_module("conv", conv());
  m.register_module("drop", drop);
  m.define(R"(
    def forward(self, x):
        x = self.drop.forward(self.conv.forward(x))
        return torch.dropout(torch.tanh(self.drop.forward(torch.sigmoid(self.conv.forward(x)))), 0.5, True)
  )");
  Module original = reload(m);
  rewrite(m, {});
  expect_same_numbers(original, m, image());
}

// A smooth activation's derivative needs the sum, and so the residual operand; PyTorch's saves the sum itself.
TEST(Rewrite, AResidualThatIsOverwrittenLater) {
  for (const char* act : {"silu", "relu"}) {
    Module m = net(fmt::format(R"(
      def forward(self, x):
          r = self.conv.forward(x)
          y = torch.{}(self.bn.forward(x) + r)
          r.mul_(2.0)
          return y, r
    )",
                               act));
    Module original = reload(m);
    const auto report = rewrite(m, only({"bn-add-act"}));
    if (act == std::string("relu")) {
      EXPECT_EQ(names(report), V{"bn-add-act"});
    } else {
      EXPECT_EQ(names(report), V{});
      ASSERT_FALSE(report.refused.empty());
      EXPECT_NE(report.refused[0].reason.find("later"), std::string::npos) << report.refused[0].reason;
    }
    expect_same_numbers(original, m, image());
  }
}

// As timm's forward_head: the argument's default decides the branch, and with it whether the dropout has a neighbour.
TEST(Rewrite, ADropoutInAnotherMethodOfTheSameModule) {
  Module m = net(R"(
    def head(self, x, features: bool):
        x = torch.dropout(x, 0.0, self.training)
        if features:
            r = x
        else:
            r = torch.tanh(x)
        return r
    def forward(self, x):
        return self.head(self.conv.forward(x), False)
  )");
  Module original = reload(m);
  rewrite(m, {});
  FileCheck().check("tsmem::dropout")->run(graph(m));
  expect_same_numbers(original, m, image());
}

TEST(Patterns, AreDescribedInWords) {
  for (const auto& p : tsmem::all_patterns())
    EXPECT_FALSE(p.algebra.empty() || p.keeps.empty() || p.conditions.empty() || p.rules.empty()) << p.name;
}

TEST(Rewrite, ProductsOfMatricesInEverySpelling) {
  for (const char* spelling :
       {"torch.mm(x, w)", "torch.addmm(b, x, w)", "torch.addmm(b, x, w, beta=0.5, alpha=2)",
        "torch.bmm(x.unsqueeze(0), w.unsqueeze(0))", "torch.baddbmm(b, x.unsqueeze(0), w.unsqueeze(0), alpha=0.3)"}) {
    SCOPED_TRACE(spelling);
    Module m = module("Net");
    m.register_parameter("w", at::randn({5, 3}), false);
    m.register_parameter("b", at::randn({3}), false);
    m.define(fmt::format("def forward(self, x):\n    w, b = self.w, self.b\n    return {}\n", spelling));
    Module original = reload(m);
    RewriteOptions o;
    o.level = tsmem::Level::regions;
    EXPECT_TRUE(matched(rewrite(m, o), "addmm"));
    expect_same_numbers(original, m, {at::randn({4, 5})});
  }
}

TEST(Rewrite, Einsum) {
  for (const char* spelling : {"torch.einsum('ij,jk->ik', [x, w])", "torch.einsum('...j,jk', [x, w])",
                               "torch.einsum('ij,jk,ik->i', [x, w, x @ w])", "torch.einsum('ij,ij->', [x, x])",
                               "torch.einsum('ij->ji', [x])", "torch.einsum('ij,kl->jl', [x, w])"}) {
    SCOPED_TRACE(spelling);
    Module m = module("Net");
    m.register_parameter("w", at::randn({5, 3}), false);
    m.define(fmt::format("def forward(self, x):\n    w = self.w\n    return {}\n", spelling));
    Module original = reload(m);
    RewriteOptions o;
    o.level = tsmem::Level::regions;
    EXPECT_TRUE(matched(rewrite(m, o), "einsum"));
    FileCheck().check("tsmem::einsum")->run(graph(m));
    expect_same_numbers(original, m, {at::randn({4, 5})});
    o.level = tsmem::Level::ops;  // what is gained is what others make again
    EXPECT_FALSE(matched(rewrite(original, o), "einsum"));
  }
}

TEST(Rewrite, EverySpellingOfAComposedActivation) {
  for (const char* spelling :
       {"y * torch.sigmoid(y)", "y.sigmoid() * y", "y * torch.hardtanh(y + 3, 0, 6) / 6",
        "y * (torch.hardtanh(3 + y, 0, 6) * 0.16666666666666666)", "torch.tanh(torch.softplus(y)) * y",
        "y * 0.5 * (1.0 + torch.erf(y / 1.4142135623730951))", "0.5 * (y * (torch.erf(y * 0.7071067811865475) + 1))",
        "(1 + torch.erf(y / 1.4142135623730951)) * y / 2",
        "0.5 * y * (1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * torch.pow(y, 3.0))))",
        "0.5 * y * (1.0 + torch.tanh((y + 0.044715 * y * y * y) * 0.7978845608028654))",
        "y * (0.5 * (torch.tanh(0.7978845608028654 * (y * y * y * 0.044715 + y)) + 1))",
        "0.5 * y * (1.0 + torch.tanh(y * 0.7978845608 * (1.0 + 0.044715 * y * y)))"}) {
    SCOPED_TRACE(spelling);
    Module m = net(fmt::format("def forward(self, x):\n    y = self.conv.forward(x)\n    return {}\n", spelling));
    Module original = reload(m);
    EXPECT_TRUE(matched(rewrite(m, {}), "composed-activation"));
    FileCheck().check("tsmem::composed_act")->check_not("aten::mul")->run(graph(m));
    expect_same_numbers(original, m, image());
  }
}

TEST(Rewrite, DoesNotTakeWhatIsNoComposedActivation) {
  for (const char* other : {"y * torch.sigmoid(y * 2)",                             // Swish with a factor
                            "y * torch.clamp(y + 3, 0, 6) / 6",                     // another gradient at the borders
                            "y * 0.5 * (1.0 + torch.erf(y / 1.41421356))",          // constants of float32
                            "y * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))",  // two tensors
                            "torch.tanh(y) * y", "y * 0.5 * (2.0 + torch.erf(y / 1.4142135623730951))"}) {
    SCOPED_TRACE(other);
    Module m = net(fmt::format("def forward(self, x):\n    y = self.conv.forward(x)\n    return {}\n", other));
    EXPECT_FALSE(matched(rewrite(m, {}), "composed-activation"));
  }
}

TEST(Rewrite, DoesNotTakeAComposedActivationWhoseStepsAreUsed) {
  Module m =
      net("def forward(self, x):\n    y = self.conv.forward(x)\n    s = torch.sigmoid(y)\n    return y * s + s\n");
  EXPECT_TRUE(refused(rewrite(m, {}), "composed-activation", "1 other user"));
}

TEST(Rewrite, DoesNotTakeAComposedActivationOfWhatIsWrittenToInBetween) {
  Module m =
      net("def forward(self, x):\n    y = self.conv.forward(x)\n    s = torch.sigmoid(y)\n    y.add_(1)\n    return y "
          "* s\n");
  const auto r = rewrite(m, {});
  EXPECT_FALSE(matched(r, "composed-activation"));
}

TEST(Rewrite, RmsNorm) {
  Module m = net("def forward(self, x):\n    return torch.rms_norm(self.conv.forward(x), [7]) * 2\n");
  Module original = reload(m);
  RewriteOptions o;
  o.level = tsmem::Level::regions;
  EXPECT_TRUE(matched(rewrite(m, o), "rms-norm"));
  expect_same_numbers(original, m, image());
}

namespace {

// A layer of a recurrent network, its operator called with `arguments`, among them w: its weights.
Module recurrent(const std::string& op, const std::string& arguments, const std::string& rest) {
  const int64_t gates = op == "lstm" ? 4 : op == "gru" ? 3 : 1;
  Module m = module("Recurrent");
  m.register_parameter("w_ih", at::randn({gates * 6, 7}) * 0.4, false);
  m.register_parameter("w_hh", at::randn({gates * 6, 6}) * 0.4, false);
  m.register_parameter("b_ih", at::randn({gates * 6}), false);
  m.register_parameter("b_hh", at::randn({gates * 6}), false);
  m.define(
      "def forward(self, x):\n    w = [self.w_ih, self.w_hh, self.b_ih, self.b_hh]\n    x = x * 1.5\n" +
      std::string("    h0 = torch.zeros([1, 3, 6], dtype=x.dtype)\n    sizes = torch.tensor([3, 3, 1])\n    y, h") +
      (op == "lstm" ? ", c" : "") + " = torch." + op + "(" + arguments + ")\n" + rest);
  return m;
}
std::string recurrent_arguments(const std::string& op, const std::string& dropout = "0.3") {
  const std::string states = op == "lstm" ? "[h0, h0]" : "h0";
  return "x, " + states + ", w, True, 1, " + dropout + ", self.training, False, True";
}

}  // namespace

TEST(Rewrite, RecurrentNetworks) {
  for (const std::string op : {"lstm", "gru", "rnn_tanh", "rnn_relu"})
    for (const bool packed : {false, true}) {
      SCOPED_TRACE(op + (packed ? ", packed" : ""));
      const std::string states = op == "lstm" ? "[h0, h0]" : "h0";
      Module m = recurrent(
          op, packed ? "x, sizes, " + states + ", w, True, 1, 0.3, self.training, False" : recurrent_arguments(op),
          "    return y, h\n");
      Module original = reload(m);
      EXPECT_EQ(names(rewrite(m, {})), V{"rnn"});
      FileCheck().check("tsmem::" + op + "(")->check_not("aten::" + op)->run(graph(m));
      FileCheck().check("int[] = prim::ListConstruct()")->run(graph(m));  // no two of them are merged: they may draw
      expect_same_numbers(original, m, {packed ? at::randn({7, 7}) : at::randn({3, 5, 7})});
    }
}

TEST(Rewrite, TheLastStateOfARecurrentNetworkMayBeOverwritten) {
  Module m = recurrent("gru", recurrent_arguments("gru"), "    h.mul_(2)\n    return y, h\n");
  Module original = reload(m);
  EXPECT_TRUE(matched(rewrite(m, {}), "rnn"));
  expect_same_numbers(original, m, {at::randn({3, 5, 7})});
}

// Of a list of states too.
TEST(Rewrite, DoesNotTakeALstmWhoseFirstStateIsOverwritten) {
  Module m = recurrent("lstm", recurrent_arguments("lstm"), "    h0.copy_(h)\n    return y, h0\n");
  const auto r = rewrite(m, {});
  EXPECT_TRUE(refused(r, "rnn", "aten::copy_ writes to an input of the match later"));
  EXPECT_FALSE(matched(r, "rnn"));
}

// PyTorch's keep copies, with which such a model trains.
TEST(Rewrite, DoesNotTakeARecurrentNetworkWhoseOutputOrInputIsOverwritten) {
  const std::pair<const char*, const char*> writes[] = {
      {"    y.mul_(2)\n    return y\n", "aten::mul_ writes to a result of the match later"},
      {"    y[:, -1].zero_()\n    return y\n", "writes to a result of the match later"},
      {"    z = torch.relu_(y.transpose(0, 1))\n    return z\n", "writes to a result of the match later"},
      {"    if self.training:\n        y.add_(1)\n    return y\n", "writes to a result of the match later"},
      {"    z = [y]\n    for t in z:\n        t.add_(1)\n    return y\n", ""},
      {"    x.add_(1)\n    return y, x\n", "writes to an input of the match later"},
      {"    h0.add_(1)\n    return y, h0\n", "writes to an input of the match later"}};
  for (const auto& [rest, reason] : writes) {
    SCOPED_TRACE(rest);
    Module m = recurrent("gru", recurrent_arguments("gru"), rest);
    Module original = reload(m);
    const auto r = rewrite(m, {});
    EXPECT_TRUE(refused(r, "rnn", reason));
    EXPECT_FALSE(matched(r, "rnn"));
    if (std::string(reason).find("an input") == std::string::npos)
      expect_same_numbers(original, m, {at::randn({3, 5, 7})});
  }
}
