// The four element types of the kernels, on every device. No torch headers; nothing here is code of an instruction set.
#pragma once
#include <cstdint>

namespace tsmem {

enum class Dtype : int32_t { f32, f64, bf16, f16 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The type that an element is computed in.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

// Calls f with a null pointer to the element's type.
template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(static_cast<float*>(nullptr));
    case Dtype::f64:
      return f(static_cast<double*>(nullptr));
    case Dtype::bf16:
      return f(static_cast<bf16*>(nullptr));
    case Dtype::f16:
      return f(static_cast<f16*>(nullptr));
  }
}

}  // namespace tsmem
