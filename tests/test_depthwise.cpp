#include "rewriter/verify/depthwise.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

namespace tsmem {
namespace {

struct Case {
  int64_t channels, multiplier, height, width, kernel[2], stride[2], padding[2], dilation[2];
};

// The convolution and its three gradients.
std::vector<at::Tensor> results(const Case& c, at::MemoryFormat format) {
  auto generator = at::detail::getDefaultCPUGenerator().clone();
  generator.set_current_seed(1);
  const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, generator, at::kDouble); };
  auto x = random({2, c.channels, c.height, c.width}).contiguous(format).requires_grad_();
  auto w = random({c.channels * c.multiplier, 1, c.kernel[0], c.kernel[1]}).requires_grad_();
  auto b = random({c.channels * c.multiplier}).requires_grad_();
  auto y = at::conv2d(x, w, b, c.stride, c.padding, c.dilation, c.channels);
  y.backward(random(y.sizes()));
  return {y.detach(), x.grad(), w.grad(), b.grad()};
}

TEST(FastDepthwise, IsPyTorchsConvolution) {
  const Case cases[] = {{6, 1, 9, 7, {3, 3}, {1, 1}, {1, 1}, {1, 1}},  {5, 1, 12, 13, {5, 3}, {2, 2}, {2, 1}, {1, 1}},
                        {4, 3, 8, 11, {3, 2}, {1, 2}, {0, 3}, {2, 1}}, {3, 2, 16, 16, {7, 7}, {3, 1}, {3, 3}, {1, 2}},
                        {2, 1, 1, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}},  {4, 1, 2, 5, {1, 5}, {2, 3}, {4, 6}, {1, 1}},
                        {3, 1, 10, 10, {2, 2}, {4, 4}, {0, 0}, {3, 3}}};
  for (auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast})
    for (const auto& c : cases) {
      const auto expected = results(c, format);
      std::vector<at::Tensor> got;
      {
        const FastDepthwise fast;
        got = results(c, format);
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(got[i].sizes(), expected[i].sizes());
        EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-12, 1e-12)) << i << " of a convolution of " << c.channels;
      }
    }
}

TEST(FastDepthwise, LeavesOthersAlone) {
  const FastDepthwise fast;
  const auto x = at::ones({1, 4, 5, 5}, at::kDouble);
  const std::optional<at::Tensor> none;
  const std::vector<int64_t> one = {1, 1}, zero = {0, 0};
  EXPECT_EQ(at::conv2d(x, at::ones({2, 2, 3, 3}, at::kDouble), none, one, zero, one, 2).sizes(),
            (at::IntArrayRef{1, 2, 3, 3}));
  EXPECT_EQ(at::conv_transpose2d(x, at::ones({4, 1, 3, 3}, at::kDouble), {}, 1, 0, 0, 4).size(2), 7);
  EXPECT_EQ(at::conv2d(x.to(at::kFloat), at::ones({4, 1, 3, 3}), none, one, zero, one, 4).scalar_type(), at::kFloat);
  EXPECT_THROW(at::conv2d(x, at::ones({4, 1, 7, 7}, at::kDouble), none, one, zero, one, 4), c10::Error);
  EXPECT_THROW(at::conv2d(x, at::ones({4, 1, 3, 3}), none, one, zero, one, 4), c10::Error);
}

}  // namespace
}  // namespace tsmem
