// The CUDA kernels under ThreadSanitizer, on emulated threads: whether two accesses that nothing orders meet in memory.
// With blocks in order races within a block are found, and where they aren't, those between blocks too.
#include <gtest/gtest.h>

#include <atomic>

#include "act_table.h"
#include "cases.h"
#include "cuda/launch.h"
#include "cuda/shared.h"
#include "cuda/together.h"

namespace {
std::atomic<int> reports;
}
extern "C" __attribute__((visibility("default"))) void __tsan_on_report(void*) { ++reports; }
// Each race counts, also at an address where another one was.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "exitcode=0:suppress_equal_addresses=0:suppress_equal_stacks=0";
}

namespace tsmem::cuda {

void fail(const char* what, const char* why) { emulate::stuck((std::string(what) + ": " + why).c_str()); }

namespace {

constexpr unsigned kPlanted = 64;  // threads of a planted kernel
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f64};

template <class F>
int races(bool blocks_in_order, F f) {
  emulate::state().blocks_in_order = blocks_in_order;
  const int before = reports;
  f();
  return reports - before;
}

template <class F>
int planted(bool blocks_in_order, int64_t blocks, F kernel) {
  double out[4 * kPlanted] = {};
  return races(blocks_in_order, [&] { emulate::run(blocks, kPlanted, 1, [&] { kernel(out); }); });
}

// What another thread wrote is read without a barrier between.
void without_barrier(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = threadIdx.x;
  out[blockIdx.x * kPlanted + threadIdx.x] = values[kPlanted - 1 - threadIdx.x];
}

// What others still read is written again: the barrier after a reduction is missing.
void written_too_early(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  double sum = 0;
  for (double v : values) sum += v;
  values[threadIdx.x] = sum;
  __syncthreads();
  out[blockIdx.x * kPlanted + threadIdx.x] = values[threadIdx.x];
}

// A barrier orders what lies on its two sides, and not what comes after the next one.
void one_barrier_too_few(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = 1;
  __syncthreads();
  __syncthreads();
  if (threadIdx.x == 5) values[7] = 2;
  out[blockIdx.x * kPlanted + threadIdx.x] = values[7];
  __syncthreads();
}

// The threads of a warp run together and yet in no order.
void warp_without_barrier(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = 1;
  __syncthreads();
  for (unsigned step = 16; step > 0; step /= 2)
    if (threadIdx.x % 32 < step) values[threadIdx.x] += values[threadIdx.x + step];
  out[blockIdx.x * kPlanted + threadIdx.x / 32] = values[threadIdx.x - threadIdx.x % 32];
}

// A shuffle exchanges numbers and is no barrier for memory.
void shuffle_as_barrier(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
  out[blockIdx.x * kPlanted + threadIdx.x] = values[threadIdx.x ^ 1] + __shfl_xor_sync(0xffffffffu, 1, 1);
}

// Two blocks add to one number.
void between_blocks(double* out) {
  if (threadIdx.x == 0) out[0] += 1;
}

// A block reads what another one wrote, as if that had ended, with a barrier of its own between.
void block_after_block(double* out) {
  const unsigned self = threadIdx.x;
  if (blockIdx.x == 0 && self == 0) out[1] = 7;
  __syncthreads();
  if (blockIdx.x == 3 && self == 9) out[2] = out[1];
}

// What another block wrote is read where only the block's own threads have waited for each other.
void grid_without_barrier(double* out) {
  out[blockIdx.x * kPlanted + threadIdx.x] = threadIdx.x;
  __syncthreads();
  const double other = threadIdx.x == 9 ? out[(blockIdx.x ^ 1) * kPlanted + 3] : 0;
  sync_grid();
  out[blockIdx.x * kPlanted + threadIdx.x] = other;
}

// What other blocks still read is written again.
void grid_written_too_early(double* out) {
  out[blockIdx.x * kPlanted + threadIdx.x] = threadIdx.x;
  sync_grid();
  const double other = threadIdx.x == 9 ? out[(blockIdx.x ^ 1) * kPlanted + 3] : 0;
  out[blockIdx.x * kPlanted + threadIdx.x] = other;
}

void grid_right(double* out) {
  out[blockIdx.x * kPlanted + threadIdx.x] = threadIdx.x;
  sync_grid();
  const double other = out[(blockIdx.x ^ 1) * kPlanted + kPlanted - 1 - threadIdx.x];
  sync_grid();
  out[blockIdx.x * kPlanted + threadIdx.x] = other;
}

void right(double* out) {
  struct Values;
  auto& values = shared<Values, double[kPlanted]>();
  values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  double sum = 0;
  for (double v : values) sum += v;
  __syncthreads();
  values[threadIdx.x] = sum;
  __syncthreads();
  out[blockIdx.x * kPlanted + threadIdx.x] = values[kPlanted - 1 - threadIdx.x];
}

TEST(Races, PlantedOnesAreFoundWithinABlock) {
  for (const bool in_order : {false, true}) {
    const int64_t blocks = in_order ? 2 : 1;
    EXPECT_GT(planted(in_order, blocks, without_barrier), 0);
    EXPECT_GT(planted(in_order, blocks, written_too_early), 0);
    EXPECT_GT(planted(in_order, blocks, one_barrier_too_few), 0);
    EXPECT_GT(planted(in_order, blocks, warp_without_barrier), 0);
    EXPECT_GT(planted(in_order, blocks, shuffle_as_barrier), 0);
  }
}

TEST(Races, PlantedOnesAreFoundBetweenBlocks) {
  EXPECT_GT(planted(false, 4, between_blocks), 0);
  EXPECT_GT(planted(false, 4, block_after_block), 0);
  EXPECT_EQ(planted(true, 4, between_blocks), 0);
  EXPECT_EQ(planted(true, 4, block_after_block), 0);
  EXPECT_EQ(planted(false, 4, right), 0);
  EXPECT_EQ(planted(true, 4, right), 0);
}

// The blocks of a cooperative launch are in no order but that of its barriers.
TEST(Races, PlantedOnesAreFoundBetweenBlocksThatWaitForEachOther) {
  const auto found = [](bool in_order, auto kernel) {
    double out[4 * kPlanted] = {};
    return races(in_order, [&] { emulate::run_together(4, kPlanted, 1, 0, [&] { kernel(out); }); });
  };
  for (const bool in_order : {false, true}) {
    EXPECT_GT(found(in_order, grid_without_barrier), 0);
    EXPECT_GT(found(in_order, grid_written_too_early), 0);
    EXPECT_EQ(found(in_order, grid_right), 0);
  }
}

// The order of launches on a stream is kept.
TEST(Races, LaunchesAreInOrder) {
  double out[kPlanted] = {};
  for (const bool in_order : {false, true})
    EXPECT_EQ(races(in_order,
                    [&] {
                      for (unsigned i = 0; i < 6; ++i)
                        emulate::run(1, kPlanted, 1, [&] { out[(threadIdx.x + i) % kPlanted] += i; });
                    }),
              0);
}

// Planes and rows, of whole octets and not, in one part and in many, of one channel and of more than a block has.
constexpr cases::Shape kShapes[] = {{4, 3, 49},   {3, 5, 32},   {66, 33, 1}, {70, 8, 1},
                                    {2, 1, 3001}, {300, 24, 1}, {3, 300, 1}, {2, 2, 64}};

class Norms : public testing::TestWithParam<std::tuple<cases::Shape, bool>> {};
TEST_P(Norms, HaveNone) {
  const auto& [shape, in_order] = GetParam();
  for (const Dtype dtype : kDtypes)
    for (const ActKind kind : {ActKind::identity, ActKind::relu, ActKind::silu, ActKind::gelu, ActKind::hardtanh})
      for (const bool add : {false, true}) {
        if (add && dtype != Dtype::f32) continue;
        // Many channels are many blocks that finish sums, which no dtype or activation changes.
        if (shape.channels > 256 && (dtype != Dtype::f32 || kind != ActKind::relu)) continue;
        EXPECT_EQ(races(in_order, [&] { cases::norm(shape, dtype, kind, add, one_bit(kind)); }), 0)
            << shape.outer << " " << shape.channels << " " << shape.inner << ", activation " << static_cast<int>(kind);
      }
}
INSTANTIATE_TEST_SUITE_P(Races, Norms, testing::Combine(testing::ValuesIn(kShapes), testing::Bool()));

// Three blocks of work on two that are there at once.
TEST(Races, NormsThatStayOnChipHaveNone) {
  emulate::state().multiprocessors = 1;
  const cases::Shape shape{4097, 8, 1};
  const NormArgs a = cases::view(shape, Dtype::bf16, ActKind::relu, true);
  EXPECT_EQ(split(a, 1).parts(), 3);
  EXPECT_TRUE(norm_forward_fits(a) && norm_backward_fits(a));
  EXPECT_EQ(races(false, [&] { cases::norm(shape, Dtype::bf16, ActKind::relu, true, true); }), 0);
  emulate::state().multiprocessors = emulate::kMultiprocessors;
}

class Pools : public testing::TestWithParam<std::tuple<bool, bool>> {};
TEST_P(Pools, HaveNone) {
  const auto& [last, in_order] = GetParam();
  for (const Dtype dtype : kDtypes)
    for (const int64_t channels : {3, 8})
      for (const cases::Window& window : {cases::Window{3, 2, 1, 1}, cases::Window{2, 2, 0, 1},
                                          cases::Window{3, 1, 1, 2}, cases::Window{17, 3, 8, 1}})
        for (const ActKind kind : {ActKind::relu, ActKind::silu})
          EXPECT_EQ(races(in_order, [&] { cases::pools(2, channels, 9, 8, window, dtype, last, kind); }), 0)
              << channels << " channels, window " << window.size;
}
INSTANTIATE_TEST_SUITE_P(Races, Pools, testing::Combine(testing::Bool(), testing::Bool()));

TEST(Races, MasksHaveNone) {
  for (const bool in_order : {false, true})
    for (const Dtype dtype : kDtypes)
      for (const ActKind kind : {ActKind::relu, ActKind::leaky_relu, ActKind::hardtanh})
        for (const int64_t n : {1, 1003, 4096})
          EXPECT_EQ(races(in_order, [&] { cases::masks(n, dtype, kind, n % 2); }), 0);
}

TEST(Races, DropoutsHaveNone) {
  for (const bool in_order : {false, true})
    for (const Dtype dtype : kDtypes)
      for (const int64_t n : {1, 1002, 1003, 9000})
        EXPECT_EQ(races(in_order, [&] { cases::dropouts(n, dtype, n % 2); }), 0);
}

}  // namespace
}  // namespace tsmem::cuda
