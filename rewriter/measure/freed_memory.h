// Freed memory stays with this process.
#pragma once
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tsmem {

// While it lives glibc gives no freed memory back. A step's time would else depend on what happens to lie at the end of
// the heap: whether it is given back after every step, to be cleared again by the kernel, for the one model or for the
// other. Of the time that a large model's comparison takes that is the larger part. Afterwards the limits are glibc's
// own again; those that a program has set itself can't be asked for.
struct KeepFreedMemory {
#ifdef __GLIBC__
  KeepFreedMemory() {
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_MMAP_MAX, 0);
  }
  ~KeepFreedMemory() {
    mallopt(M_TRIM_THRESHOLD, 128 * 1024);
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
