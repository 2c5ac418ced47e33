// Threads, blocks and warps of a CUDA device on one thread of the CPU, so that the kernels of ops/cuda are tested where
// there is no device: as much of the language as they use. Blocks run one after the other; the threads of a block are
// fibers, which switch at __syncthreads() and at warp operations alone, in the order of their numbers and, every other
// block, in the reverse order: a kernel that depends on the order gives other numbers. A thread that leaves, or waits
// at another kind of barrier, while the others wait ends the process. What a block shares is filled with NaN before.
// The blocks of a cooperative launch are all there at once, and are switched where all threads of one wait for the
// grid.
//
// Under ThreadSanitizer the threads are threads of its own. What orders two accesses there is what does on a device, a
// launch and a __syncthreads(), and neither the order in which fibers run nor a warp's exchange. Making such a thread
// takes it long: those of a block serve again for the kInTurn-th block after it, which comes after it for that reason.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void*, unsigned flags);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define TSMEM_UNSEEN __attribute__((no_sanitize("thread")))
#else
#define TSMEM_UNSEEN
#endif

struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};

namespace emulate {

#ifdef __SANITIZE_THREAD__
constexpr bool kFindsRaces = true;
// Whoever calls after(at) comes after all that called before(at) until then.
TSMEM_UNSEEN inline void before(void* at) { __tsan_release(at); }
TSMEM_UNSEEN inline void after(void* at) { __tsan_acquire(at); }
TSMEM_UNSEEN inline void* current() { return __tsan_get_current_fiber(); }
TSMEM_UNSEEN inline void* create() { return __tsan_create_fiber(0); }
TSMEM_UNSEEN inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: orders nothing
#else
constexpr bool kFindsRaces = false;
inline void before(void*) {}
inline void after(void*) {}
inline void* current() { return nullptr; }
inline void* create() { return nullptr; }
inline void switch_to(void*) {}
#endif

struct Dim {
  unsigned x = 0, y = 0;
};

enum class Wait { nothing, block, warp, grid, gone };

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStack = 64 * 1024;
constexpr size_t kShared = 48 * 1024;  // what a kernel may declare
// What cooperative launches fit on: a multiprocessor's shared memory and blocks, and what each block takes beside its
// dynamic memory.
constexpr size_t kChip = 228 * 1024, kChipOfBlock = 16 * 1024;
constexpr unsigned kMultiprocessors = 2, kBlocksOfOne = 2;

struct Fiber {
  ucontext_t context;       // where it begins
  jmp_buf place;            // where it waits: unlike swapcontext, without a system call
  void* seen_as = nullptr;  // ThreadSanitizer's thread
  std::unique_ptr<char[]> stack;
  bool begun;
  Wait wait;
  unsigned barriers;  // that it has passed
  unsigned grid_barriers;
};

// What a block runs in.
struct Room {
  Fiber fibers[kMostThreads];
  alignas(16) char shared[kShared];
  struct {
    const void* name;
    size_t at;
  } arrays[16];
  size_t count, used;
  std::unique_ptr<uint4[]> dynamic;  // shared memory whose size the launch gave
  char barriers[2];                  // nobody waits at one of them and still has to leave the other
  unsigned turn = 0;                 // blocks that have run here
  char done[2];                      // of this turn, and of the one before
};
constexpr unsigned kRooms = kMultiprocessors * kBlocksOfOne;
constexpr unsigned kInTurn = kFindsRaces ? 4 : 1;  // rooms of blocks that run one after the other
static_assert(kInTurn <= kRooms);

struct State {
  Dim thread, block, block_size, grid;
  Room rooms[kRooms];  // never moved: a context points into itself
  Room* room = nullptr;
  ucontext_t scheduler_context;
  jmp_buf scheduler;
  void* host = nullptr;
  unsigned current = 0;
  const std::function<void()>* body = nullptr;
  double exchange[kMostThreads];  // what each thread shows to its warp
  char launched;
  char grid_barriers[2];
  bool blocks_in_order = false;                 // each block comes after the one before it
  int64_t only_first = -1, only_last = -1;      // as many blocks of each end run, where they aren't negative
  unsigned multiprocessors = kMultiprocessors;  // at most so many
};
inline State whole_state;
TSMEM_UNSEEN inline State& state() { return whole_state; }

[[noreturn]] inline void stuck(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

// From a fiber to the scheduler.
TSMEM_UNSEEN inline void leave(Fiber& f) {
  State& s = state();
  if constexpr (kFindsRaces) {  // a jump to another stack would end what it believes to be called
    switch_to(s.host);
    swapcontext(&f.context, &s.scheduler_context);
  } else if (_setjmp(f.place) == 0) {
    _longjmp(s.scheduler, 1);
  }
}

TSMEM_UNSEEN inline void enter() {
  State& s = state();
  Room& room = *s.room;
  after(&s.launched);
  after(&room.done[(room.turn + 1) % 2]);
  (*s.body)();
  before(&room.done[room.turn % 2]);
  Fiber& self = room.fibers[s.current];
  self.wait = Wait::gone;
  leave(self);
}

TSMEM_UNSEEN inline void wait(Wait what) {
  State& s = state();
  Room& room = *s.room;
  Fiber& self = room.fibers[s.current];
  char* at = what == Wait::block  ? &room.barriers[self.barriers++ % 2]
             : what == Wait::grid ? &s.grid_barriers[self.grid_barriers++ % 2]
                                  : nullptr;
  if (at) before(at);
  self.wait = what;
  leave(self);
  if (at) after(at);
}

// Runs a thread up to where it waits or ends.
TSMEM_UNSEEN __attribute__((noinline)) inline void resume(Fiber& f) {
  State& s = state();
  if constexpr (kFindsRaces) {
    switch_to(f.seen_as);
    swapcontext(&s.scheduler_context, &f.context);
  } else {
    if (_setjmp(s.scheduler) != 0) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
  }
}

// Lets the threads [begin, end) go on where all of them wait for `what`.
TSMEM_UNSEEN inline bool release(Room& room, unsigned begin, unsigned end, Wait what) {
  for (unsigned t = begin; t < end; ++t)
    if (room.fibers[t].wait != what) return false;
  for (unsigned t = begin; t < end; ++t) room.fibers[t].wait = Wait::nothing;
  return true;
}

// A thread, where it begins.
TSMEM_UNSEEN inline void prepare(Fiber& f) {
  if (!f.stack) {
    f.stack.reset(new char[kStack]);
    f.seen_as = create();
  }
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  f.wait = Wait::nothing;
  f.begun = false;
  f.barriers = f.grid_barriers = 0;
  makecontext(&f.context, enter, 0);
}

// A block's threads; nothing of what they share has been asked for.
TSMEM_UNSEEN inline void prepare(Room& room, unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) prepare(room.fibers[t]);
  room.count = room.used = 0;
}

// Until all of a block's threads have ended, which it returns, or wait for the grid.
TSMEM_UNSEEN inline bool run_block(unsigned threads, bool reverse) {
  State& s = state();
  Room& room = *s.room;
  for (;;) {
    bool ran = false;
    unsigned gone = 0, at_grid = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = reverse ? threads - 1 - i : i;
      if (room.fibers[t].wait == Wait::nothing) {
        s.current = t;
        s.thread = {t % s.block_size.x, t / s.block_size.x};
        resume(room.fibers[t]);
        ran = true;
      }
      gone += room.fibers[t].wait == Wait::gone;
      at_grid += room.fibers[t].wait == Wait::grid;
    }
    if (gone == threads || at_grid == threads) return gone == threads;
    bool released = release(room, 0, threads, Wait::block);
    for (unsigned t = 0; t < threads; t += 32)
      released |= release(room, t, t + 32 < threads ? t + 32 : threads, Wait::warp);
    if (!ran && !released) stuck("some threads wait at a barrier that others never reach");
  }
}

// What a launch is, for its threads.
TSMEM_UNSEEN inline void set_launch(int64_t blocks, unsigned x, unsigned y, const std::function<void()>& body) {
  State& s = state();
  if (x * y == 0 || x * y > kMostThreads) stuck("a block has 1 to 1024 threads");
  s.block_size = {x, y};
  s.grid = {static_cast<unsigned>(blocks), 1};
  s.body = &body;
  s.host = current();
}

inline std::mutex one_launch_at_a_time;

TSMEM_UNSEEN inline void run(int64_t blocks, unsigned x, unsigned y, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  State& s = state();
  const unsigned threads = x * y;
  set_launch(blocks, x, y, body);
  const bool all = s.only_first < 0 && s.only_last < 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (!all && b >= s.only_first && b < blocks - s.only_last) {
      b = blocks - s.only_last - 1;
      continue;
    }
    s.room = &s.rooms[b % kInTurn];
    s.block = {static_cast<unsigned>(b), 0};
    prepare(*s.room, threads);
    before(&s.launched);
    if (!run_block(threads, b % 2 == 1)) stuck("a grid barrier in a launch that isn't cooperative");
    if (s.blocks_in_order) after(&s.room->done[s.room->turn % 2]);
    ++s.room->turn;
  }
  for (Room& room : s.rooms)
    for (char& done : room.done) after(&done);
}

// Each byte 0xff. Volatile: memset would be seen as an access.
TSMEM_UNSEEN inline void fill(void* memory, size_t size) {
  auto* words = static_cast<volatile uint64_t*>(memory);
  for (size_t i = 0; i < (size + 7) / 8; ++i) words[i] = ~uint64_t{0};
}

// A cooperative launch. From grid barrier to grid barrier the blocks run in order and in the reverse order in turns.
TSMEM_UNSEEN inline void run_together(unsigned blocks, unsigned x, unsigned y, size_t dynamic,
                                      const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  State& s = state();
  const unsigned threads = x * y;
  set_launch(blocks, x, y, body);
  if (blocks > s.multiprocessors * kBlocksOfOne) stuck("more blocks at once than the device has room for");
  const size_t words = (dynamic + sizeof(uint4) - 1) / sizeof(uint4);
  for (unsigned b = 0; b < blocks; ++b) {
    prepare(s.rooms[b], threads);
    s.rooms[b].dynamic.reset(new uint4[words]);
    fill(s.rooms[b].dynamic.get(), words * sizeof(uint4));
  }
  before(&s.launched);
  for (unsigned barriers = 0;; ++barriers) {
    unsigned gone = 0;
    for (unsigned i = 0; i < blocks; ++i) {
      const unsigned b = barriers % 2 == 1 ? blocks - 1 - i : i;
      s.room = &s.rooms[b];
      s.block = {b, 0};
      gone += run_block(threads, (b + barriers) % 2 == 1);
    }
    if (gone == blocks) break;
    if (gone > 0) stuck("some blocks wait at a grid barrier that others never reach");
    for (unsigned b = 0; b < blocks; ++b) release(s.rooms[b], 0, threads, Wait::grid);
  }
  for (unsigned b = 0; b < blocks; ++b) ++s.rooms[b].turn;
  for (Room& room : s.rooms)
    for (char& done : room.done) after(&done);
}

// The block's array of that name, each byte 0xff before it is written.
TSMEM_UNSEEN inline void* shared(const void* name, size_t size) {
  Room& room = *state().room;
  for (size_t i = 0; i < room.count; ++i)
    if (room.arrays[i].name == name) return room.shared + room.arrays[i].at;
  if (room.used + size > kShared || room.count == std::size(room.arrays)) stuck("more shared memory than a block has");
  room.arrays[room.count++] = {name, room.used};
  char* found = room.shared + room.used;
  room.used += (size + 15) / 16 * 16;
  fill(found, size);
  return found;
}

TSMEM_UNSEEN inline uint4* dynamic_shared() { return state().room->dynamic.get(); }

}  // namespace emulate

#define threadIdx (emulate::state().thread)
#define blockIdx (emulate::state().block)
#define blockDim (emulate::state().block_size)
#define gridDim (emulate::state().grid)

inline void __syncthreads() { emulate::wait(emulate::Wait::block); }

TSMEM_UNSEEN inline double __shfl_xor_sync(unsigned mask, double v, int lanes) {
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
