#include "ops/traits.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "rewriter/apply.h"

namespace tsmem {
namespace {

TEST(Traits, AreOfOperatorsThatExist) {
  for (const OperatorTraits& t : kOperatorTraits)
    EXPECT_FALSE(torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(std::string(t.name))).empty()) << t.name;
}

TEST(Traits, OperatorsThatCallAMethodTakeItsModuleAndName) {
  for (const OperatorTraits& t : kOperatorTraits) {
    if (!t.calls_method) continue;
    const auto op = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(std::string(t.name))).at(0);
    EXPECT_EQ(op->schema().arguments().at(0).name(), "self") << t.name;
    EXPECT_EQ(op->schema().arguments().at(1).name(), "method") << t.name;
  }
}

TEST(Traits, DecideWhatOffersToBeRecomputed) {
  EXPECT_EQ(offers_recompute("tsmem::conv2d"), Offers::expensive);
  EXPECT_EQ(offers_recompute("tsmem::linear"), Offers::expensive);
  EXPECT_EQ(offers_recompute("tsmem::batch_norm_act"), Offers::cheap);
  EXPECT_EQ(offers_recompute("tsmem::avg_pool2d"), Offers::nothing);
}

}  // namespace
}  // namespace tsmem
