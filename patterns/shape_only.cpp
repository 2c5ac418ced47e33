#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// Ops whose backward needs no more than sizes.
Pattern shape_only() {
  Pattern p{
      .name = "shape-only",
      .algebra = "avg_pool, adaptive_avg_pool, pads that reflect or replicate, Fourier transforms of real tensors",
      .keeps = "before: the input, and a pad's output; after: sizes, and what a pad's output is made from",
      .conditions = "a pad's mode is a constant",
      .rules = {}};
  const std::pair<const char*, size_t> ops[] = {
      {"avg_pool1d", 6},
      {"avg_pool2d", 7},
      {"avg_pool3d", 7},
      {"adaptive_avg_pool1d", 2},
      {"adaptive_avg_pool2d", 2},
      {"adaptive_avg_pool3d", 2},
      {"reflection_pad1d", 2},
      {"reflection_pad2d", 2},
      {"reflection_pad3d", 2},
      {"replication_pad1d", 2},
      {"replication_pad2d", 2},
      {"replication_pad3d", 2},
      {"pad", 4},
      {"fft_fft", 4},
      {"fft_rfft", 4},
      {"fft_rfft2", 4},
      {"fft_rfftn", 4},
      {"stft", 9},
      {"stft", 11},
  };
  for (const auto& [op, arguments] : ops) p.rules.push_back(same_schema(op, arguments));
  return p;
}

}  // namespace tsmem
