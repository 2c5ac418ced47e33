// Freed memory stays with this process.
#pragma once
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tsmem {

// While it lives glibc gives no freed memory back. A step's time would else depend on what happens to lie at the end of
// the heap: whether it is given back after every step, to be cleared again by the kernel, for the one model or for the
// other. Of the time that a large model's comparison takes that is the larger part. What the limits were can't be asked
// for, and once set, glibc no longer moves them: afterwards they are where its own rule ends in a process that has
// freed large blocks, as a program that trains has.
struct KeepFreedMemory {
#ifdef __GLIBC__
  KeepFreedMemory() {
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_MMAP_MAX, 0);
  }
  ~KeepFreedMemory() {
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
    mallopt(M_MMAP_MAX, 65536);
    malloc_trim(0);
  }
#else
  KeepFreedMemory() {}
#endif
  KeepFreedMemory(const KeepFreedMemory&) = delete;
  KeepFreedMemory& operator=(const KeepFreedMemory&) = delete;
};

}  // namespace tsmem
