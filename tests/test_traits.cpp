#include "ops/recompute_argument.h"
#include "ops/traits.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "rewriter/rewrite/apply.h"

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

TEST(RecomputeArgument, IsOneIntInSchemasAndWrittenFiles) {
  using tsmem::Recompute, tsmem::RecomputeArgument, tsmem::argument_of;
  for (int64_t argument = -9; argument <= 19; ++argument) EXPECT_EQ(RecomputeArgument(argument).argument(), argument);
  EXPECT_EQ(argument_of(Recompute::off), 0);
  EXPECT_EQ(argument_of(Recompute::shared), 1);
  EXPECT_EQ(argument_of(Recompute::each_time), 2);
  EXPECT_EQ(argument_of(Recompute::if_cheap), 3);
  EXPECT_EQ(argument_of(Recompute::keep), -1);
  EXPECT_TRUE(RecomputeArgument(3).offered() && RecomputeArgument(3).recomputes());
  EXPECT_EQ(argument_of(Recompute::offload), 4);
  EXPECT_TRUE(RecomputeArgument(4).offered() && !RecomputeArgument(4).recomputes());
  const auto kept = RecomputeArgument(-7), recomputed = RecomputeArgument(15), offloaded = RecomputeArgument(16);
  EXPECT_TRUE(kept.site == 5 && !kept.recomputes() && recomputed.site == 5 && recomputed.recomputes());
  EXPECT_TRUE(offloaded.site == 5 && offloaded.how == Recompute::offload);
}
