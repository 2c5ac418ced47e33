// What stays for backward: the table of what operators save, and what a graph says by it.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <sstream>

#include "rewriter/file/in_memory.h"
#include "rewriter/measure/saved_tensors_of_step.h"
#include "rewriter/modules.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/stays/saved_by.h"
#include "rewriter/stays/stays.h"

namespace tsmem {
namespace {

using torch::jit::Module;

TEST(SavedBy, RowsAreOfOperatorsAndArgumentsThatExist) {
  for (const SavedByRow& row : saved_by_rows()) {
    const auto overloads = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(std::string(row.op)));
    EXPECT_FALSE(overloads.empty() && row.op != "aten::__interpolate") << row.op;
    const auto takes = [&](const std::string& name) {
      return name == "result" || std::any_of(overloads.begin(), overloads.end(), [&](const auto& op) {
               return op->schema().argumentIndexWithName(name).has_value();
             });
    };
    const SavedBy saved = *saved_by(row.op);
    for (const SavedBy::Part& part : saved.parts) {
      EXPECT_TRUE(takes(part.argument)) << row.op << " " << part.argument;
      EXPECT_TRUE(part.gradient_of.empty() || takes(part.gradient_of)) << row.op << " " << part.gradient_of;
    }
  }
}

TEST(SavedBy, InPlaceOperatorsAreTheirNamesakes) {
  EXPECT_EQ(saved_by("aten::relu_")->parts.at(0).argument, "result");
  EXPECT_TRUE(saved_by("aten::add_")->parts.empty());
  EXPECT_FALSE(saved_by("aten::no_such_operator"));
  EXPECT_TRUE(saved_by("tsmem::of_tomorrow")->all_arguments);
}

Module module(const std::string& name) {
  Module m(name);
  m.register_attribute("training", c10::BoolType::get(), true);
  return m;
}

void add_parameter(Module& m, const std::string& name, const at::Tensor& t) {
  m.register_parameter(name, t.clone().set_requires_grad(true), false);
}

constexpr int64_t kChannels = 32;  // 576 operations for an element of a convolution's output

Module conv(int64_t in = kChannels, int64_t out = kChannels, int64_t size = 3, int64_t groups = 1) {
  Module m = module("Conv");
  add_parameter(m, "weight", at::randn({out, in / groups, size, size}));
  m.define(fmt::format(
      "def forward(self, x):\n    return torch.conv2d(x, self.weight, None, [1, 1], [{0}, {0}], [1, 1], {1})\n",
      size / 2, groups));
  return m;
}

Module norm() {
  Module m = module("Norm");
  add_parameter(m, "weight", at::ones({kChannels}));
  add_parameter(m, "bias", at::zeros({kChannels}));
  m.define(
      "def forward(self, x):\n    return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.1, 1e-5, "
      "True)\n");
  return m;
}

Module net(const std::string& code, int64_t channels = kChannels) {
  Module m = module("Net");
  m.register_module("conv1", conv(channels));
  m.register_module("bn1", norm());
  m.register_module("conv2", conv());
  m.define("def forward(self, x):\n" + code);
  return m;
}

const char* const kResidual =
    "    y = torch.relu(self.bn1.forward(self.conv1.forward(x)))\n    return self.conv2.forward(y)\n";

std::vector<std::string> lines(const Saved& saved) {
  std::vector<std::string> all;
  for (const Stay& s : saved.stays) all.push_back(s.module + " " + s.op + " for " + s.keeper_module + " " + s.keeper);
  return all;
}

Saved saved(Module& m, Level level) {
  RewriteOptions options;
  options.level = level;
  return rewrite(m, options).saved;
}

TEST(SavedTensors, TheNormsInputStaysWhereItsOutputIsRecomputed) {
  Module m = net(kResidual);
  const Saved s = saved(m, Level::regions);
  EXPECT_EQ(lines(s), std::vector<std::string>{"conv1 tsmem::conv2d for bn1 tsmem::batch_norm_act"});
  EXPECT_EQ(s.stays.at(0).why, Why::expensive);
  EXPECT_EQ(s.original_tensors, 2);  // the convolution's and the activation's outputs: x is an argument
  EXPECT_EQ(s.tensors, 1);
  EXPECT_FALSE(s.bytes || s.stays[0].bytes);
}

TEST(SavedTensors, OfAFirstLayerOfFewChannelsNothingStays) {
  Module m = net(kResidual, 3), ops = net(kResidual, 3);
  EXPECT_EQ(lines(saved(m, Level::regions)), std::vector<std::string>{});
  EXPECT_EQ(lines(saved(ops, Level::ops)).size(), 2u);
}

// A first convolution of 32 channels, another layer behind it, and what of the latter stays for the SiLU.
std::vector<std::string> kept_of_layer(const Module& layer, const Module* before = nullptr) {
  Module m = module("Net");
  m.register_module("conv1", conv());
  m.register_module("before", before ? *before : module("Nothing"));
  m.register_module("layer", layer);
  m.define(std::string("def forward(self, x):\n    y = torch.silu(self.conv1.forward(x))\n") +
           (before ? "    y = torch.silu(self.before.forward(y))\n" : "") +
           "    return torch.silu(self.layer.forward(y))\n");
  auto all = lines(saved(m, Level::regions));
  all.erase(std::remove_if(all.begin(), all.end(), [](const std::string& s) { return s.rfind("layer", 0) != 0; }),
            all.end());
  return all;
}

TEST(SavedTensors, OfALayerThatTakesFewOperationsNothingStays) {
  const std::vector<std::string> nothing, all = {"layer tsmem::conv2d for  tsmem::act"};
  EXPECT_EQ(kept_of_layer(conv(32, 128, 1)), nothing);
  EXPECT_EQ(kept_of_layer(conv(32, 32, 3, 32)), nothing);
  EXPECT_EQ(kept_of_layer(conv(32, 16, 1)), all);      // its input is larger
  EXPECT_EQ(kept_of_layer(conv(32, 128, 3)), all);     // 576 operations
  EXPECT_EQ(kept_of_layer(conv(32, 32, 5, 32)), all);  // 50, of a depthwise one
  const Module cheap = conv(32, 32, 1), expensive = conv();
  EXPECT_EQ(kept_of_layer(conv(32, 32, 1), &cheap), all);
  EXPECT_EQ(kept_of_layer(conv(32, 32, 1), &expensive), nothing);
  Module frozen = conv(32, 32, 1);
  frozen.attr("weight").toTensor().set_requires_grad(false);
  EXPECT_EQ(kept_of_layer(frozen), nothing);  // made from what the activation keeps
}

TEST(SavedTensors, WhatMayBeOverwrittenIsNamed) {
  Module m =
      net("    h = self.conv1.forward(x)\n    y = torch.relu(self.bn1.forward(h))\n    z = self.conv2.forward(y)\n"
          "    h.detach().mul_(2)\n    return z\n");
  for (const Stay& s : saved(m, Level::regions).stays)
    if (s.op == "tsmem::batch_norm_act") {
      EXPECT_EQ(s.why, Why::overwritten);
      EXPECT_EQ(
          s.reason,
          "tsmem::conv2d needs it, and code whose result nothing uses may overwrite what it would be recomputed from");
      return;
    }
  FAIL() << "the output of the norm is kept";
}

TEST(SavedTensors, AtLevelOpsTheActivationStaysToo) {
  Module m = net(kResidual);
  const Saved s = saved(m, Level::ops);
  ASSERT_EQ(lines(s), (std::vector<std::string>{"conv1 tsmem::conv2d for bn1 tsmem::batch_norm_act",
                                                "bn1 tsmem::batch_norm_act for conv2 tsmem::conv2d"}));
  EXPECT_EQ(s.stays[1].why, Why::level_ops);
}

TEST(SavedTensors, WhatNeedsNoGradientKeepsNothing) {
  Module frozen = net(kResidual);
  frozen.attr("conv2").toModule().attr("weight").toTensor().set_requires_grad(false);
  EXPECT_EQ(lines(saved(frozen, Level::regions)),
            std::vector<std::string>{"conv1 tsmem::conv2d for bn1 tsmem::batch_norm_act"});
}

TEST(SavedTensors, OperatorsWithoutOneOfOursAreNamed) {
  Module m = net("    y = torch.cumprod(self.conv1.forward(x), 1)\n    return self.conv2.forward(y)\n");
  const Saved s = saved(m, Level::regions);
  ASSERT_FALSE(s.stays.empty());
  EXPECT_EQ(s.stays[0].keeper, "aten::cumprod");
  EXPECT_EQ(s.stays[0].why, Why::no_operator);
  EXPECT_NE(s.stays[0].reason.find("no operator"), std::string::npos);
  Module unknown = net("    return torch.linalg_matrix_exp(self.conv1.forward(x))\n");
  EXPECT_EQ(saved(unknown, Level::regions).stays.at(0).why, Why::unknown);
}

TEST(SavedTensors, LoopsListsAndBranchesAreFollowed) {
  Module m =
      net("    ys = [self.conv1.forward(x)]\n"
          "    for i in range(3):\n"
          "        ys.append(torch.cumprod(ys[i], 1))\n"
          "    if self.training:\n"
          "        y = ys[0]\n"
          "    else:\n"
          "        y = ys[1]\n"
          "    return self.conv2.forward(torch.cat(ys)) + self.conv2.forward(y)\n");
  std::set<std::string> makers;
  for (const Stay& s : saved(m, Level::regions).stays) makers.insert(s.op + " for " + s.keeper);
  EXPECT_TRUE(makers.count("tsmem::conv2d for aten::cumprod") || makers.count("aten::cumprod for aten::cumprod"));
}

// What the graph says is what a run keeps, as far as makers and keepers go; by the measured bytes nothing is missing.
TEST(KeptBytes, AreOfTheTensorsThatTheGraphNames) {
  at::set_num_threads(1);
  for (const Level level : {Level::ops, Level::regions}) {
    Module m = net(kResidual);
    const Saved s = saved(m, level);
    Module copy = copy_in_memory(m);
    const at::Tensor x = at::randn({2, kChannels, 32, 32});
    const auto kept = saved_tensors_of_step(copy, {x}, {});
    RewriteOptions options;
    options.level = level;
    std::vector<std::string> large;
    for (const Stay& stay : stays_of(kept, options, {}))
      if (*stay.bytes >= static_cast<int64_t>(x.nbytes()))
        large.push_back(stay.module + " " + stay.op + " for " + stay.keeper_module + " " + stay.keeper);
    auto named = lines(s);
    std::sort(named.begin(), named.end());
    std::sort(large.begin(), large.end());
    EXPECT_EQ(large, named);
  }
}

}  // namespace
}  // namespace tsmem
