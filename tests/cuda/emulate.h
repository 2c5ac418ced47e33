// Threads, blocks and warps of a CUDA device on one thread of the CPU, so that the kernels of ops/cuda are tested where
// there is no device: as much of the language as they use. Blocks run one after the other; the threads of a block are
// fibers, which switch at __syncthreads() and at warp operations alone, in the order of their numbers and, every other
// block, in the reverse order: a kernel that depends on the order gives other numbers. A thread that leaves, or waits
// at another kind of barrier, while the others wait ends the process.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};

namespace emulate {

struct Dim {
  unsigned x = 0, y = 0;
};

enum class Wait { nothing, block, warp, gone };

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it waits: unlike swapcontext, without a system call
  std::unique_ptr<char[]> stack;
  bool begun = false;
  Wait wait = Wait::nothing;
};

struct State {
  Dim thread, block, block_size;
  std::vector<Fiber> fibers = std::vector<Fiber>(1024);  // never moved: a context points into itself
  jmp_buf scheduler;
  unsigned current = 0;
  const std::function<void()>* body = nullptr;
  double exchange[1024];  // what each thread shows to its warp
};
inline State& state() {
  static State s;
  return s;
}

inline void enter() {
  State& s = state();
  (*s.body)();
  s.fibers[s.current].wait = Wait::gone;
  _longjmp(s.scheduler, 1);
}

inline void wait(Wait what) {
  State& s = state();
  Fiber& self = s.fibers[s.current];
  self.wait = what;
  if (_setjmp(self.place) == 0) _longjmp(s.scheduler, 1);
}

// Runs a thread up to where it waits or ends.
__attribute__((noinline)) inline void resume(Fiber& f) {
  State& s = state();
  if (_setjmp(s.scheduler) != 0) return;
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.context);
}

[[noreturn]] inline void stuck(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

// Lets the threads [begin, end) go on where all of them wait for `what`.
inline bool release(State& s, unsigned begin, unsigned end, Wait what) {
  for (unsigned t = begin; t < end; ++t)
    if (s.fibers[t].wait != what) return false;
  for (unsigned t = begin; t < end; ++t) s.fibers[t].wait = Wait::nothing;
  return true;
}

inline void run_block(unsigned threads, bool reverse) {
  constexpr size_t kStack = 64 * 1024;
  State& s = state();
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = s.fibers[t];
    if (!f.stack) {
      f.stack = std::make_unique<char[]>(kStack);
      getcontext(&f.context);
    }
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    f.wait = Wait::nothing;
    f.begun = false;
    makecontext(&f.context, enter, 0);
  }
  for (;;) {
    bool ran = false;
    unsigned gone = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = reverse ? threads - 1 - i : i;
      if (s.fibers[t].wait == Wait::nothing) {
        s.current = t;
        s.thread = {t % s.block_size.x, t / s.block_size.x};
        resume(s.fibers[t]);
        ran = true;
      }
      gone += s.fibers[t].wait == Wait::gone;
    }
    if (gone == threads) return;
    bool released = release(s, 0, threads, Wait::block);
    for (unsigned t = 0; t < threads; t += 32)
      released |= release(s, t, t + 32 < threads ? t + 32 : threads, Wait::warp);
    if (!ran && !released) stuck("some threads wait at a barrier that others never reach");
  }
}

inline void run(int64_t blocks, unsigned x, unsigned y, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  State& s = state();
  if (x * y == 0 || x * y > 1024) stuck("a block has 1 to 1024 threads");
  s.block_size = {x, y};
  s.body = &body;
  for (int64_t b = 0; b < blocks; ++b) {
    s.block = {static_cast<unsigned>(b), 0};
    run_block(x * y, b % 2 == 1);
  }
}

}  // namespace emulate

#define threadIdx (emulate::state().thread)
#define blockIdx (emulate::state().block)
#define blockDim (emulate::state().block_size)

inline void __syncthreads() { emulate::wait(emulate::Wait::block); }

inline double __shfl_xor_sync(unsigned mask, double v, int lanes) {
  auto& s = emulate::state();
  const unsigned self = s.current;
  if (mask != 0xffffffffu || s.block_size.x * s.block_size.y % 32 != 0) emulate::stuck("not a whole warp");
  s.exchange[self] = v;
  emulate::wait(emulate::Wait::warp);
  const double got = s.exchange[self ^ static_cast<unsigned>(lanes)];
  emulate::wait(emulate::Wait::warp);
  return got;
}

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
