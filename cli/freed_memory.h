// Freed memory stays with this process.
#pragma once
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tsmem::cli {

// A step's time would else depend on what happens to lie at the end of the heap: whether glibc gives it back after
// every step, to be cleared again by the kernel, for the one model or for the other. Of the time that a large model's
// comparison takes it is the larger part.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_MMAP_MAX, 0);
#endif
}

}  // namespace tsmem::cli
