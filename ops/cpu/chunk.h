// Chunks of the four dtypes as the type that is computed in, and scratch memory, for kernels only (compiled once an
// instruction set). Chunks that are float or double already are used where they lie.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/convert.h"

namespace tsmem::TSMEM_ISA {

// The chunk x[0, n) in the type it is computed in: x itself, or `buffer` filled from it.
template <class T, class A>
static inline const A* load(const T* x, A* buffer, int64_t n) {
  if constexpr (sizeof(T) == sizeof(A)) {
    return x;
  } else {
    widen(x, buffer, n);
    return buffer;
  }
}

// Where to compute a chunk that goes to out[0, n): out itself, or `buffer`, which store() then converts.
template <class T, class A>
static inline A* target(T* out, A* buffer) {
  if constexpr (sizeof(T) == sizeof(A))
    return out;
  else
    return buffer;
}
template <class T, class A>
static inline void store(const A* buffer, T* out, int64_t n) {
  if constexpr (sizeof(T) != sizeof(A)) narrow(buffer, out, n);
}

// Zeroed memory. Kernels use no templates of the standard library: the linker could take another instruction set's copy
// of them.
template <class A>
struct Scratch {
  A* data;
  explicit Scratch(int64_t n) : data(static_cast<A*>(std::calloc(n > 0 ? n : 1, sizeof(A)))) {
    if (!data) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A& operator[](int64_t i) { return data[i]; }
};

}  // namespace tsmem::TSMEM_ISA
