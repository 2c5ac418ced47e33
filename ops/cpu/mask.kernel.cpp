#include "cpu/mask.h"

#include <algorithm>

#include "cpu/convert.h"

namespace tsmem::TSMEM_ISA {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are converted at once: stays in the first-level cache

// The bits of eight values, of the kinds that pack_any() names. The comparisons are PyTorch's: NaN passes a relu's and
// a threshold's gradient, and no other's.
template <class C>
inline uint8_t bits_of(const C* x, ActKind kind, C a, C b) {
#if defined(__AVX2__)
  if constexpr (sizeof(C) == 4) {
    const __m256 v = _mm256_loadu_ps(x), lo = _mm256_set1_ps(a), hi = _mm256_set1_ps(b);
    if (kind == ActKind::relu || kind == ActKind::threshold)
      return _mm256_movemask_ps(_mm256_cmp_ps(v, lo, _CMP_NLE_UQ));
    const __m256 above = _mm256_cmp_ps(v, lo, _CMP_GT_OQ);
    if (kind == ActKind::leaky_relu) return _mm256_movemask_ps(above);
    return _mm256_movemask_ps(_mm256_and_ps(above, _mm256_cmp_ps(v, hi, _CMP_LT_OQ)));
  } else {
    int bits = 0;
    const __m256d lo = _mm256_set1_pd(a), hi = _mm256_set1_pd(b);
    for (int half = 0; half < 2; ++half) {
      const __m256d v = _mm256_loadu_pd(x + 4 * half);
      __m256d on = _mm256_cmp_pd(v, lo, _CMP_GT_OQ);
      if (kind == ActKind::relu || kind == ActKind::threshold)
        on = _mm256_cmp_pd(v, lo, _CMP_NLE_UQ);
      else if (kind != ActKind::leaky_relu)
        on = _mm256_and_pd(on, _mm256_cmp_pd(v, hi, _CMP_LT_OQ));
      bits |= _mm256_movemask_pd(on) << 4 * half;
    }
    return bits;
  }
#else
  int bits = 0;
  for (int i = 0; i < 8; ++i) {
    bool on = x[i] > a;
    if (kind == ActKind::relu || kind == ActKind::threshold)
      on = !(x[i] <= a);
    else if (kind != ActKind::leaky_relu)
      on = on && x[i] < b;
    bits |= int{on} << i;
  }
  return bits;
#endif
}

// act(x) where it is cheap, as PyTorch computes it: a zero keeps its sign, NaN stays.
template <class C>
inline C value_of(C x, ActKind kind, C a, C b) {
  switch (kind) {
    case ActKind::relu:
      return x < 0 ? C(0) : x;
    case ActKind::threshold:
      return x <= a ? b : x;
    case ActKind::leaky_relu:
      return x > 0 ? x : x * a;
    default: {
      const C low = x < a ? a : x;
      return low > b ? b : low;
    }
  }
}

template <ActKind kind, class T>
void pack(const Act& act, const T* x, T* y, uint8_t* mask, int64_t n) {
  using C = compute_t<T>;
  const C a = static_cast<C>(act.a), b = static_cast<C>(act.b);
  C lo = a, hi = b;  // what the bits compare with
  if (kind == ActKind::relu || kind == ActKind::leaky_relu) lo = 0;
  if (kind == ActKind::hardsigmoid) lo = -3, hi = 3;
  C in[kBlock], out[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, mask += kBlock / 8) {
    const int64_t count = std::min(kBlock, n - start);
    const C* from = in;
    if constexpr (std::is_same_v<T, C>) {
      if (count % 8 == 0) from = x + start;
    }
    if (from == in) {
      widen(x + start, in, count);
      for (int64_t i = count; i % 8; ++i) in[i] = 0;
    }
    for (int64_t i = 0; i < count; i += 8) mask[i / 8] = bits_of(from + i, kind, lo, hi);
    if (!y) continue;
    if constexpr (std::is_same_v<T, C>) {
      for (int64_t i = 0; i < count; ++i) y[start + i] = value_of(from[i], kind, a, b);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = value_of(from[i], kind, a, b);
      narrow(out, y + start, count);
    }
  }
}

// The bits alone, by the formula of the table.
template <class Row, class T>
void pack_by_row(const Act& act, const T* x, uint8_t* mask, int64_t n) {
  using C = compute_t<T>;
  const ActNumbers<C> p = numbers_of<C>(act);
  C in[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, mask += kBlock / 8) {
    const int64_t count = std::min(kBlock, n - start);
    widen(x + start, in, count);
    for (int64_t i = count; i % 8; ++i) in[i] = 0;
    for (int64_t i = 0; i < count; i += 8) {
      int bits = 0;
      for (int k = 0; k < 8; ++k) bits |= int{Row::upper(in[i + k], p)} << k;
      mask[i / 8] = static_cast<uint8_t>(bits);
    }
  }
}

// out = bit ? grad * on : grad * off, and `off` 0 means no gradient at all, not even NaN.
template <class C>
inline void apply_eight(const C* grad, uint8_t bits, C* out, C on, C off, bool zero) {
#if defined(__AVX2__)
  if constexpr (sizeof(C) == 4) {
    const __m256i which = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), which), which));
    const __m256 g = _mm256_loadu_ps(grad), yes = _mm256_mul_ps(g, _mm256_set1_ps(on));
    _mm256_storeu_ps(
        out, zero ? _mm256_and_ps(set, yes) : _mm256_blendv_ps(_mm256_mul_ps(g, _mm256_set1_ps(off)), yes, set));
    return;
  }
#endif
  for (int i = 0; i < 8; ++i) {
    const C no = zero ? C(0) : grad[i] * off;
    out[i] = (bits >> i) & 1 ? grad[i] * on : no;
  }
}

template <class T>
void apply(const Act& act, const T* grad, const uint8_t* mask, T* out, int64_t n) {
  using C = compute_t<T>;
  Slopes slopes;
  bool zero = true;
  with_row(act.kind, [&](auto row) {
    slopes = slopes_of<decltype(row)>(act);
    if constexpr (row.saves == ActSaves::bit) zero = !row.lower_slope;
  });
  const C on = static_cast<C>(slopes.on), off = static_cast<C>(slopes.off);
  C in[kBlock], done[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, mask += kBlock / 8) {
    const int64_t count = std::min(kBlock, n - start);
    if constexpr (std::is_same_v<T, C>) {
      if (count % 8 == 0) {
        for (int64_t i = 0; i < count; i += 8)
          apply_eight(grad + start + i, mask[i / 8], out + start + i, on, off, zero);
        continue;
      }
    }
    widen(grad + start, in, count);
    for (int64_t i = count; i % 8; ++i) in[i] = 0;
    for (int64_t i = 0; i < count; i += 8) apply_eight(in + i, mask[i / 8], done + i, on, off, zero);
    narrow(done, out + start, count);
  }
}

void pack_any(Dtype dtype, const Act& act, const void* x, void* y, uint8_t* mask, int64_t n) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    switch (act.kind) {
      case ActKind::relu:
        return pack<ActKind::relu>(act, from, to, mask, n);
      case ActKind::hardtanh:
        return pack<ActKind::hardtanh>(act, from, to, mask, n);
      case ActKind::threshold:
        return pack<ActKind::threshold>(act, from, to, mask, n);
      case ActKind::leaky_relu:
        return pack<ActKind::leaky_relu>(act, from, to, mask, n);
      case ActKind::hardsigmoid:
        return pack<ActKind::hardsigmoid, T>(act, from, nullptr, mask, n);
      default:
        return with_row(act.kind, [&](auto row) {
          if constexpr (row.saves == ActSaves::bit) pack_by_row<decltype(row)>(act, from, mask, n);
        });
    }
  });
}

void apply_any(Dtype dtype, const Act& act, const void* grad, const uint8_t* mask, void* out, int64_t n) {
  with_dtype(dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    apply(act, static_cast<const T*>(grad), mask, static_cast<T*>(out), n);
  });
}

}  // namespace

extern const MaskKernels mask_kernels_table;
const MaskKernels mask_kernels_table = {pack_any, apply_any};

}  // namespace tsmem::TSMEM_ISA
