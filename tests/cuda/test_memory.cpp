// The CUDA kernels on emulated threads under AddressSanitizer and UndefinedBehaviorSanitizer: alignment, what lies
// beside a map, shared memory that nobody wrote, and indices beyond 2^31, on maps that are address space alone.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "act_table.h"
#include "cases.h"
#include "cuda/launch.h"
#include "cuda/shared.h"
#include "cuda/together.h"

namespace tsmem::cuda {

void fail(const char* what, const char* why) { emulate::stuck((std::string(what) + ": " + why).c_str()); }

namespace {

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::f16};

TEST(Memory, NormsStayInTheirMaps) {
  for (const cases::Shape& shape :
       {cases::Shape{4, 3, 49}, {3, 5, 32}, {66, 33, 1}, {70, 8, 1}, {2, 1, 3001}, {3, 300, 1}, {12, 1032, 1}})
    for (const Dtype dtype : kDtypes)
      for (const ActKind kind : {ActKind::relu, ActKind::gelu})
        for (const int64_t offset : {0, 1}) {
          if (shape.channels > 256 && (dtype != Dtype::f32 || kind != ActKind::relu)) continue;
          cases::norm(shape, dtype, kind, kind == ActKind::relu, one_bit(kind), offset);
        }
}

TEST(Memory, PoolsStayInTheirMaps) {
  for (const Dtype dtype : kDtypes)
    for (const bool last : {false, true})
      for (const int64_t channels : {3, 8})
        for (const cases::Window& window : {cases::Window{3, 2, 1, 1}, {2, 2, 0, 1}, {3, 1, 1, 2}, {17, 3, 8, 1}})
          cases::pools(2, channels, 9, 8, window, dtype, last, ActKind::relu);
}

TEST(Memory, MasksStayInTheirMaps) {
  for (const Dtype dtype : kDtypes)
    for (const int64_t n : {1, 1003, 4096})
      for (const int64_t offset : {0, 1}) cases::masks(n, dtype, ActKind::relu, offset);
}

TEST(Memory, DropoutsStayInTheirMaps) {
  for (const Dtype dtype : kDtypes)
    for (const int64_t n : {1, 1002, 1003, 9000})
      for (const int64_t offset : {0, 1}) cases::dropouts(n, dtype, offset);
}

// What these tests are for is caught.
TEST(Memory, AMapThatIsNotAlignedIsNoticed) {
  cases::Memory memory(Dtype::f32, 1);
  Act act;
  act.kind = ActKind::relu;
  const void* x = memory.map(1024);
  EXPECT_DEATH(mask_pack(Dtype::f32, act, x, memory.map(1024), reinterpret_cast<uint8_t*>(memory.bytes(128)), 1024,
                         true, nullptr),
               "misaligned address");
}

TEST(Memory, AReadBesideAMapIsNoticed) {
  cases::Memory memory(Dtype::f32);
  Act act;
  act.kind = ActKind::relu;
  void* y = memory.map(1024);
  const std::unique_ptr<float[]> x(new float[1023]());
  EXPECT_DEATH(
      mask_pack(Dtype::f32, act, x.get(), y, reinterpret_cast<uint8_t*>(memory.bytes(128)), 1024, false, nullptr),
      "heap-buffer-overflow");
}

TEST(Memory, SharedMemoryHoldsNothing) {
  struct Values;
  double found[2][32] = {};
  emulate::run(2, 32, 1, [&] {
    auto& values = shared<Values, double[32]>();
    if (threadIdx.x < 16) values[threadIdx.x] = blockIdx.x;
    __syncthreads();
    found[blockIdx.x][threadIdx.x] = values[threadIdx.x];
  });
  for (unsigned block : {0, 1})
    for (unsigned t = 0; t < 32; ++t) EXPECT_EQ(std::isnan(found[block][t]), t >= 16);
}

TEST(Memory, ABlocksDynamicMemoryHoldsNothingAndEnds) {
  double found[2][32] = {};
  emulate::run_together(2, 32, 1, 256, [&] {
    auto* values = reinterpret_cast<double*>(dynamic_shared());
    if (threadIdx.x < 16) values[threadIdx.x] = blockIdx.x;
    sync_grid();
    found[blockIdx.x][threadIdx.x] = values[threadIdx.x];
  });
  for (unsigned block : {0, 1})
    for (unsigned t = 0; t < 32; ++t) EXPECT_EQ(std::isnan(found[block][t]), t >= 16);
  EXPECT_DEATH(emulate::run_together(2, 32, 1, 256, [&] { dynamic_shared()[threadIdx.x / 16 * 16].x = 1; }),
               "heap-buffer-overflow");
}

TEST(Memory, AThreadOrABlockThatMissesTheGridsBarrierEndsTheProcess) {
  const char* const thread = "some threads wait at a barrier that others never reach";
  const char* const block = "some blocks wait at a grid barrier that others never reach";
  const auto run = [](auto kernel) { emulate::run_together(2, 32, 1, 0, kernel); };
  EXPECT_DEATH(run([] {
                 if (threadIdx.x != 3) sync_grid();
               }),
               thread);
  EXPECT_DEATH(run([] { threadIdx.x == 3 ? __syncthreads() : sync_grid(); }), thread);
  EXPECT_DEATH(run([] {
                 if (blockIdx.x != 1) sync_grid();
               }),
               block);
  EXPECT_DEATH(emulate::run(2, 32, 1, [] { sync_grid(); }), "isn't cooperative");
}

// --- Beyond 2^31 elements

constexpr int64_t kProbe = 64;  // elements of each end

// bf16 without memory until it is written; reads as 0.
class Map {
 public:
  explicit Map(int64_t n) : size_(2 * n) {
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("no address space for " + std::to_string(size_) + " bytes");
  }
  ~Map() { munmap(memory_, size_); }
  Map(const Map&) = delete;
  void* data() const { return memory_; }
  float at(int64_t i) const {
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(memory_)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  // Small whole numbers, which bf16 has, in the `n` elements from `begin` on.
  void fill(int64_t begin, int64_t n) {
    for (int64_t i = begin; i < begin + n; ++i) {
      const float value = static_cast<float>(i * 7 % 13 - 6);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      static_cast<uint16_t*>(memory_)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }

 private:
  size_t size_;
  void* memory_;
};

// The first and the last blocks of each launch alone.
struct EndsOnly {
  explicit EndsOnly(int64_t first = 2, int64_t last = 2) {
    emulate::state().only_first = first, emulate::state().only_last = last;
  }
  ~EndsOnly() { emulate::state().only_first = emulate::state().only_last = -1; }
};

// Rows of whole octets and not, planes of whole octets, planes that are not, and few large ones.
constexpr cases::Shape kLarge[] = {{(int64_t{1} << 25) + 9, 64, 1},
                                   {(int64_t{1} << 25) + 5, 67, 1},
                                   {3001, 3, 262144},
                                   {14700003, 3, 49},
                                   {3, 1, (int64_t{1} << 30) + 8}};

class Large : public testing::TestWithParam<cases::Shape> {};
INSTANTIATE_TEST_SUITE_P(Memory, Large, testing::ValuesIn(kLarge));

struct LargeNorm {
  NormArgs a;
  Map x, out, grad;
  std::vector<float> mean, invstd, weight, bias, tilt, level;
  explicit LargeNorm(const cases::Shape& shape)
      : a(cases::view(shape, Dtype::bf16, ActKind::relu, true)), x(a.numel), out(a.numel), grad(a.numel) {
    const auto numbers = [&](std::vector<float>& v, float first, float step) {
      for (int64_t c = 0; c < a.channels; ++c) v.push_back(first + step * static_cast<float>(c % 4));
      return static_cast<const void*>(v.data());
    };
    a.mean = numbers(mean, 1, 1), a.invstd = numbers(invstd, 2, 0.5);
    a.weight = {numbers(weight, 1, 1), Dtype::f32, 1}, a.bias = {numbers(bias, -1, 1), Dtype::f32, 1};
    numbers(tilt, 0.25, 0.25), numbers(level, 1, 1);
    a.x = x.data(), a.out = out.data();
    for (Map* map : {&x, &grad}) map->fill(0, 4096), map->fill(a.numel - 4096, 4096);
  }
  int64_t channel(int64_t e) const { return e / a.inner % a.channels; }
  float pre(int64_t e) const {
    const int64_t c = channel(e);
    return (x.at(e) - mean[c]) * invstd[c] * weight[c] + bias[c];
  }
  // f(e) for what lies at both ends.
  template <class F>
  void ends(F f) const {
    for (int64_t i = 0; i < kProbe; ++i) f(i), f(a.numel - 1 - i);
  }
};

TEST_P(Large, NormsReachBothEnds) {
  LargeNorm of(GetParam());
  ASSERT_GT(of.a.numel, int64_t{1} << 31);
  const EndsOnly ends;
  const Map mask(of.a.numel / 16 + 8);
  of.a.mask = static_cast<uint8_t*>(mask.data());
  norm_apply(of.a, nullptr);
  of.ends([&](int64_t e) {
    EXPECT_NEAR(of.out.at(e), std::max(of.pre(e), 0.f), 0.01f * std::abs(of.pre(e))) << e;
    EXPECT_EQ(of.a.mask[e / 8] >> e % 8 & 1, of.pre(e) > 0) << e;
  });
  NormArgs b = of.a;
  b.grad = of.grad.data();
  b.tilt = of.tilt.data(), b.level = of.level.data();
  for (const bool masked : {true, false}) {
    b.from_mask = masked;
    norm_grad(b, nullptr);
    of.ends([&](int64_t e) {
      const int64_t c = of.channel(e);
      const float g = of.pre(e) > 0 ? of.grad.at(e) : 0, centred = of.x.at(e) - of.mean[c];
      const float expected = g * of.invstd[c] * of.weight[c] - (centred * of.tilt[c] + of.level[c]);
      EXPECT_NEAR(of.out.at(e), expected, 0.01f * std::abs(expected) + 1e-6f) << e;
    });
  }
}

// The last part of a reduction has the map's last elements.
TEST_P(Large, SumsReachTheEnd) {
  LargeNorm of(GetParam());
  NormArgs b = of.a;
  b.grad = of.grad.data();
  b.out = nullptr;
  const Split s = split(b, 1);
  const int64_t c = b.channels;
  std::vector<double> partial(3 * c * s.parts(), -1.0);
  const int64_t across = b.planar() ? c : 1;
  const EndsOnly ends(0, across);  // all channels of the last part
  norm_reduce(b, s, partial.data(), nullptr);
  double sum = 0, expected = 0, before = 0;
  for (int64_t i = 0; i < c; ++i) sum += partial[2 * ((s.parts() - 1) * c + i)];
  for (int64_t i = 0; i < 2 * c; ++i) before += std::abs(partial[2 * c * (s.parts() - 2) + i] + 1);
  for (int64_t e = b.numel - 4096; e < b.numel; ++e) expected += of.pre(e) > 0 ? of.grad.at(e) : 0;
  EXPECT_EQ(sum, expected);
  EXPECT_EQ(before, 0);
  norm_stats(of.a, s, partial.data(), nullptr);
  double count = 0, total = 0;
  for (int64_t i = 0; i < c; ++i) {
    const double* part = &partial[3 * ((s.parts() - 1) * c + i)];
    count += part[0], total += part[0] * part[1];
  }
  expected = 0;
  for (int64_t e = b.numel - 4096; e < b.numel; ++e) expected += of.x.at(e);
  EXPECT_NEAR(total, expected, 1e-3 * (1 + std::abs(expected)));
  EXPECT_GT(count, 4096);
}

TEST(Memory, LargeMasksReachBothEnds) {
  const int64_t n = (int64_t{1} << 31) + 1003;
  Map x(n);
  const Map y(n), mask(n / 16 + 8);
  x.fill(0, 4096), x.fill(n - 4096, 4096);
  Act act;
  act.kind = ActKind::relu;
  const EndsOnly ends;
  auto* bits = static_cast<uint8_t*>(mask.data());
  mask_pack(Dtype::bf16, act, x.data(), y.data(), bits, n, true, nullptr);
  for (int64_t e : {int64_t{0}, int64_t{5}, n - 1, n - 7, n - 900}) {
    EXPECT_EQ(y.at(e), std::max(x.at(e), 0.f)) << e;
    EXPECT_EQ(bits[e / 8] >> e % 8 & 1, x.at(e) > 0) << e;
  }
  mask_apply(Dtype::bf16, act, x.data(), bits, y.data(), n, true, nullptr);
  for (int64_t e : {int64_t{0}, int64_t{5}, n - 1, n - 7, n - 900}) EXPECT_EQ(y.at(e), std::max(x.at(e), 0.f)) << e;
}

// A thread draws once: the last of them for the last elements.
TEST(Memory, LargeDropoutsReachBothEnds) {
  const int64_t blocks = (int64_t{1} << 20) + 2, threads = blocks * kDropoutThreads;
  for (const int64_t n : {8 * threads, 4 * 2 * threads - 1}) {
    const bool single = n % 2 == 1;
    Map x(n);
    const Map out(n), again(n);
    x.fill(0, 4096), x.fill(n - 4096, 4096);
    const Spread spread = dropout_spread(n, 2, 16, single ? blocks : blocks / 2, 512);
    ASSERT_EQ(spread.group, single ? 1 : 8);
    ASSERT_EQ(spread.blocks, single ? 2 * blocks : blocks);
    EXPECT_EQ(dropout_counter(n, spread), single ? 4 : 8);
    Draw draw;
    draw.seed = 11, draw.counter = 4;
    int64_t state[2];
    const EndsOnly ends;
    dropout(Dtype::bf16, x.data(), out.data(), n, 0.5, draw, spread, state, true, nullptr);
    EXPECT_EQ(state[0], 11);
    EXPECT_EQ(state[1], 4);
    Draw saved;
    saved.seed_at = state, saved.counter_at = state + 1;
    dropout(Dtype::bf16, x.data(), again.data(), n, 0.5, saved, spread, nullptr, true, nullptr);
    int64_t kept = 0, of = 0;
    for (int64_t e : {int64_t{0}, n - 200})
      for (int64_t i = e; i < e + 200; ++i) {
        if (x.at(i) == 0) continue;
        EXPECT_TRUE(out.at(i) == 0 || out.at(i) == 2 * x.at(i)) << i;
        EXPECT_EQ(out.at(i), again.at(i)) << i;
        kept += out.at(i) != 0, ++of;
      }
    EXPECT_NEAR(static_cast<double>(kept) / of, 0.5, 0.15);
  }
}

// Windows of 2 x 2, every one of two steps.
TEST(Memory, LargePoolsReachBothEnds) {
  for (const bool last : {false, true}) {
    const int64_t batch = 33, channels = 64, side = 1026, half = side / 2;
    PoolArgs p;
    p.norm = cases::view({last ? batch * side * side : batch, channels, last ? 1 : side * side}, Dtype::bf16,
                         ActKind::relu, true);
    p.channels_last = last;
    p.batch = batch;
    for (PoolAxis* axis : {&p.h, &p.w}) axis->in = side, axis->out = half, axis->window = 2, axis->stride = 2;
    ASSERT_GT(p.inputs(), int64_t{1} << 31);
    Map x(p.inputs()), grad(p.outputs());
    const Map y(p.outputs()), back(p.inputs()), positions(p.outputs() / 2 + 8);
    const auto input = [&](int64_t n, int64_t c, int64_t h, int64_t w) {
      return last ? ((n * side + h) * side + w) * channels + c : ((n * channels + c) * side + h) * side + w;
    };
    const auto output = [&](int64_t n, int64_t c, int64_t h, int64_t w) {
      return last ? ((n * half + h) * half + w) * channels + c : ((n * channels + c) * half + h) * half + w;
    };
    const int64_t tail = 4 * side * channels;
    x.fill(0, tail), x.fill(p.inputs() - tail, tail);
    grad.fill(0, tail / 4), grad.fill(p.outputs() - tail / 4, tail / 4);
    p.x = x.data(), p.out = y.data(), p.positions = positions.data(), p.grad = grad.data();
    prepare(p, true);
    const EndsOnly ends(4, 4);
    pool_forward(p, nullptr);
    prepare(p, false);
    p.out = back.data();
    pool_backward(p, nullptr);
    const struct { int64_t n, c, h; } probes[] = {{0, 0, 0}, {batch - 1, channels - 1, half - 1}};
    for (const auto& [n, c, h] : probes)
      for (int64_t i = 0; i < (last ? 4 : 100); ++i) {
        const int64_t w = n == 0 ? i : half - 1 - i;
        float best = -INFINITY;
        int64_t where = 0;
        for (int64_t k = 0; k < 4; ++k) {
          const float v = x.at(input(n, c, 2 * h + k / 2, 2 * w + k % 2));
          if (v > best) best = v, where = k;
        }
        EXPECT_EQ(y.at(output(n, c, h, w)), best) << n << " " << w;
        EXPECT_EQ(static_cast<const uint8_t*>(positions.data())[output(n, c, h, w)], where);
        if (i >= 2 && last) continue;      // what one block of backward has
        const int64_t k = n == 0 ? 0 : 3;  // the map's very first and very last rows
        const float expected = where == k ? grad.at(output(n, c, h, w)) : 0;
        EXPECT_EQ(back.at(input(n, c, 2 * h + k / 2, 2 * w + k % 2)), expected) << n << " " << w;
      }
  }
}

}  // namespace
}  // namespace tsmem::cuda
