// A block of the product stays in registers: up to kRows rows, two vectors of columns. Sums go over kDepth terms at a
// time, so that rounding errors grow with the root of as many.
//
// Compiled with fused multiplication and addition, as every BLAS is (ops/CMakeLists.txt).
#include "cpu/product.h"

#include <cstring>
#include <type_traits>

namespace tsmem::TSMEM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kBytes = 64, kRows = 12;
#elif defined(__AVX2__)
constexpr int64_t kBytes = 32, kRows = 6;
#else
constexpr int64_t kBytes = 16, kRows = 6;
#endif
constexpr int64_t kDepth = 128;

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes)));
  static constexpr int64_t width = kBytes / sizeof(T), panel = 2 * width;
};

template <class T>
inline __attribute__((always_inline)) typename Vector<T>::type load(const T* x) {
  typename Vector<T>::type v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

// out = start + a b for R rows, `depth` terms and one panel's columns, of which the first `columns` are there.
template <int R, class T>
void block(const T* a, int64_t a_stride, const T* b, const T* start, int64_t start_stride, T* out, int64_t out_stride,
           int64_t depth, int64_t columns) {
  using V = typename Vector<T>::type;
  constexpr int64_t w = Vector<T>::width;
  V sums[R][2] = {};
  for (int64_t i = 0; i < depth; ++i) {
    const V left = load(b + i * 2 * w), right = load(b + i * 2 * w + w);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const T x = a[r * a_stride + i];
      sums[r][0] += x * left;
      sums[r][1] += x * right;
    }
  }
  alignas(64) T row[2 * w] = {};
  for (int r = 0; r < R; ++r) {
    const T* from = start ? start + r * start_stride : nullptr;
    if (columns == 2 * w) {
      const V left = from ? load(from) + sums[r][0] : sums[r][0],
              right = from ? load(from + w) + sums[r][1] : sums[r][1];
      std::memcpy(out + r * out_stride, &left, sizeof(V));
      std::memcpy(out + r * out_stride + w, &right, sizeof(V));
    } else {
      std::memcpy(row, sums[r], sizeof(row));
      for (int64_t j = 0; j < columns; ++j) out[r * out_stride + j] = from ? from[j] + row[j] : row[j];
    }
  }
}

// The block of as many rows as there are, R at the most.
template <int R, class T, class... Rest>
void block_of(int64_t rows, const T* a, Rest... rest) {
  if constexpr (R > 1)
    if (rows < R) return block_of<R - 1>(rows, a, rest...);
  block<R>(a, rest...);
}

template <class T>
void multiply(const ProductArgs& p, int64_t first, int64_t last) {
  constexpr int64_t panel = Vector<T>::panel;
  const auto *a = static_cast<const T*>(p.a.data), *b = static_cast<const T*>(p.panels),
             *start = static_cast<const T*>(p.start.data);
  auto* out = static_cast<T*>(p.out.data);
  const int64_t blocks = (p.rows + kRows - 1) / kRows, each = blocks ? (p.rows + blocks - 1) / blocks : 1;
  for (int64_t i = first; i < last; ++i)
    for (int64_t d = 0; d < p.depth || d == 0; d += kDepth)
      for (int64_t r = 0; r < p.rows; r += each) {
        const int64_t column = i * panel, columns = p.columns - column < panel ? p.columns - column : panel;
        T* to = out + r * p.out.stride + column;
        const T* from = d > 0 ? to : start ? start + r * p.start.stride + column : nullptr;
        block_of<kRows>(p.rows - r < each ? p.rows - r : each, a + r * p.a.stride + d, p.a.stride,
                        b + (i * p.depth + d) * panel, from, d > 0 ? p.out.stride : p.start.stride, to, p.out.stride,
                        p.depth - d < kDepth ? p.depth - d : kDepth, columns);
      }
}

template <class T>
void pack(const T* b, int64_t row_stride, int64_t column_stride, int64_t depth, int64_t columns, T* panels,
          int64_t first, int64_t last) {
  constexpr int64_t panel = Vector<T>::panel,
                    kAtOnce = 16;  // rows: of a transposed matrix those of a line of the cache
  for (int64_t i = first; i < last; ++i)
    for (int64_t d = 0; d < depth; d += kAtOnce)
      for (int64_t j = 0; j < panel; ++j) {
        const int64_t column = i * panel + j;
        for (int64_t k = d; k < depth && k < d + kAtOnce; ++k)
          panels[(i * depth + k) * panel + j] = column < columns ? b[k * row_stride + column * column_stride] : T(0);
      }
}

// f with a null pointer to the elements' type.
template <class F>
void full_precision(Dtype dtype, const F& f) {
  if (dtype == Dtype::f64)
    f(static_cast<double*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

int64_t panel_columns_any(Dtype dtype) { return dtype == Dtype::f64 ? Vector<double>::panel : Vector<float>::panel; }
void pack_any(Dtype dtype, const void* b, int64_t row_stride, int64_t column_stride, int64_t depth, int64_t columns,
              void* panels, int64_t first, int64_t last) {
  full_precision(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    pack(static_cast<const T*>(b), row_stride, column_stride, depth, columns, static_cast<T*>(panels), first, last);
  });
}
void multiply_any(const ProductArgs& p, int64_t first, int64_t last) {
  full_precision(p.dtype, [&](auto* of) { multiply<std::remove_pointer_t<decltype(of)>>(p, first, last); });
}

}  // namespace

extern const ProductKernels product_kernels_table;
const ProductKernels product_kernels_table = {panel_columns_any, pack_any, multiply_any};

}  // namespace tsmem::TSMEM_ISA
