#include "cuda/dropout.h"

#include <type_traits>

#include "cuda/element.h"

namespace tsmem::cuda {

namespace {

struct Four {
  uint32_t of[4];
};

// Philox4x32-10 (Salmon et al., 2011): four random words from a counter and a key.
__device__ inline Four philox(Four counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter.of[0], b = uint64_t{0xCD9E8D57} * counter.of[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.of[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.of[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// What a thread draws: a sequence of its own, of four numbers each, as curand_init and curand_uniform4 give them.
struct Sequence {
  uint32_t seed0, seed1;
  uint64_t thread, at;

  __device__ Sequence(const Draw& d, uint64_t thread_, int64_t* state) : thread(thread_) {
    const uint64_t seed = d.seed_at ? static_cast<uint64_t>(*d.seed_at) : d.seed;
    const uint64_t counter = d.counter + (d.counter_at ? static_cast<uint64_t>(*d.counter_at) : 0);
    if (state && thread == 0) {
      state[0] = static_cast<int64_t>(seed);
      state[1] = static_cast<int64_t>(counter);
    }
    seed0 = static_cast<uint32_t>(seed), seed1 = static_cast<uint32_t>(seed >> 32);
    at = counter / 4;
  }

  // The k-th four.
  __device__ Four words(uint64_t k) const {
    const uint64_t i = at + k;
    return philox({{static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(thread),
                    static_cast<uint32_t>(thread >> 32)}},
                  seed0, seed1);
  }
};

// 1 where a word's number in (0, 1] is below `keep`.
template <class A>
__device__ inline A kept(uint32_t word, A keep) {
  constexpr float k2To32 = 1.0f / 4294967296.0f;
  return static_cast<float>(word) * k2To32 + k2To32 / 2 < keep ? A{1} : A{0};
}

template <class T, class A>
__device__ inline T dropped(T x, uint32_t word, A keep, A scale) {
  T out;
  from_compute(to_compute(x) * kept(word, keep) * scale, out);
  return out;
}

// `group` neighbours a thread, and the next ones as many elements further as all threads have.
template <class T, int group>
__global__ void __launch_bounds__(kDropoutThreads)
    dropout_groups(const T* x, T* out, int64_t n, compute_t<T> keep, compute_t<T> scale, Draw draw, int64_t* state,
                   bool aligned) {
  constexpr int kFours = (group + 3) / 4;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t self = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Sequence sequence(draw, static_cast<uint64_t>(self), state);
  uint64_t k = 0;
  for (int64_t i = self * group; i < n; i += threads * group, k += kFours) {
    struct alignas(sizeof(T) * group) Group {
      T of[group];
    } own;
    if (aligned) {
      own = *reinterpret_cast<const Group*>(x + i);
    } else {
#pragma unroll
      for (int e = 0; e < group; ++e) own.of[e] = x[i + e];
    }
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const Four words = sequence.words(k + four);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (4 * four + e < group) own.of[4 * four + e] = dropped(own.of[4 * four + e], words.of[e], keep, scale);
    }
    if (aligned) {
      *reinterpret_cast<Group*>(out + i) = own;
    } else {
#pragma unroll
      for (int e = 0; e < group; ++e) out[i + e] = own.of[e];
    }
  }
}

// One of four numbers an element: a thread's elements lie as far apart as there are threads.
template <class T>
__global__ void __launch_bounds__(kDropoutThreads)
    dropout_single(const T* x, T* out, int64_t n, compute_t<T> keep, compute_t<T> scale, Draw draw, int64_t* state) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t self = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Sequence sequence(draw, static_cast<uint64_t>(self), state);
  uint64_t k = 0;
  for (int64_t i = self; i < n; i += 4 * threads, ++k) {
    const Four words = sequence.words(k);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (const int64_t at = i + e * threads; at < n) out[at] = dropped(x[at], words.of[e], keep, scale);
  }
}

}  // namespace

Spread dropout_spread(int64_t n, int64_t element_size, int64_t alignment, int64_t multiprocessors, int64_t threads) {
  Spread s;
  const int64_t most = multiprocessors * (threads / kDropoutThreads);
  s.blocks = min((n + kDropoutThreads - 1) / kDropoutThreads, most);
  // At most 16 bytes that memory is aligned to, and no elements left.
  int64_t group = 16 / element_size;
  while (group > 1 && (alignment % (group * element_size) != 0 || n % group != 0)) group /= 2;
  s.group = static_cast<int>(group);
  return s;
}

int64_t dropout_counter(int64_t n, const Spread& s) { return ((n - 1) / (kDropoutThreads * s.blocks * 4) + 1) * 4; }

void dropout(Dtype dtype, const void* x, void* out, int64_t n, double keep, const Draw& draw, const Spread& spread,
             int64_t* state, bool aligned, Stream stream) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    using A = compute_t<T>;
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(out);
    const A kept = static_cast<A>(keep), scale = static_cast<A>(1.0 / kept);
    const Block block{kDropoutThreads};
    const auto groups = [&](auto* kernel) {
      launch("dropout", kernel, spread.blocks, block, stream, from, to, n, kept, scale, draw, state, aligned);
    };
    switch (spread.group) {
      case 8:
        if constexpr (sizeof(T) == 2) return groups(dropout_groups<T, 8>);
        break;
      case 4:
        if constexpr (sizeof(T) <= 4) return groups(dropout_groups<T, 4>);
        break;
      case 2:
        return groups(dropout_groups<T, 2>);
      case 1:
        return launch("dropout", dropout_single<T>, spread.blocks, block, stream, from, to, n, kept, scale, draw,
                      state);
    }
    fail("dropout", "a thread has no such number of elements");
  });
}

}  // namespace tsmem::cuda
