// Batch norm in training by one kernel a direction, which keeps what it reads in shared memory from the sums to the
// map: memory is passed over twice forward (x, output) and three times backward (gradient, x, its gradient) in place of
// three and five. The grid's blocks do the work of the passes' blocks (norm.cu) in turn, by the same functions and in
// the same order, so that results do not depend on how many of them the device has room for.
//
// For rows of whole octets alone. Planes, and rows that begin anywhere, have octets that hold several channels: they
// stay with the passes. So does f64, of which half as much fits.
#include "cuda/norm_parts.h"
#include "cuda/together.h"

namespace tsmem::cuda {

namespace {

// The octets that a thread has read, in the block's dynamic memory. No other thread sees them, so nothing waits.
// Threads beside each other have words of 16 bytes beside each other.
template <class T>
struct Kept {
  static constexpr int kWords = sizeof(Octet<T>) / 16;
  uint4* memory = dynamic_shared() + threadIdx.x;
  __device__ void set(int64_t i, const Octet<T>& octet) const {
    uint4 words[kWords];
    memcpy(words, &octet, sizeof(octet));
#pragma unroll
    for (int w = 0; w < kWords; ++w) memory[(static_cast<unsigned>(i) * kWords + w) * kThreads] = words[w];
  }
  __device__ Octet<T> at(int64_t i) const {
    uint4 words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = memory[(static_cast<unsigned>(i) * kWords + w) * kThreads];
    Octet<T> octet;
    memcpy(&octet, words, sizeof(octet));
    return octet;
  }
};

// How the grid's blocks share the work.
struct Work {
  Split split;
  int64_t blocks = 0;  // of a pass
  int64_t rows = 0;    // that a thread has of one, at most
  double* partial = nullptr;
};

// map_rows() of the rows that `at` has had its sums of. kept(i, octet's operands): what was kept of the i-th row.
template <class T, class Row, bool backward, class Keeps>
__device__ inline void map_kept(const NormArgs& a, const Split& s, const Place& at, const Keeps& kept) {
  using A = compute_t<T>;
  constexpr int batch = kMapBatch<T, Row>;
  const RowsBlock b(a, s, at);
  if (b.width == 0) return;
  Channel<A> ch[8];
  A tilt[8], level[8];
  eight_channels(a, b.c, ch);
  if (backward) eight_numbers(a.tilt, b.c, tilt), eight_numbers(a.level, b.c, level);
  const int64_t step = at.high;
  for (int64_t r = b.r0 + at.y, i = 0; r < b.r1; r += batch * step, i += batch) {
    Operands<T> read[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (r + u * step < b.r1)
        read_beside<T, Row, true, backward>(a, (r + u * step) * a.channels + b.c, true, 0, 8, read[u]);
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      if (r + u * step >= b.r1) continue;
      kept(i + u, read[u]);
      map_octet<T, Row, true, backward>(a, read[u], (r + u * step) * a.channels + b.c, 8, ch, tilt, level);
    }
  }
}

template <class Args>
__device__ inline void finish(const Args& args) {
  sync_grid();
  for (int64_t b = blockIdx.x; b < finish_blocks(args.channels); b += gridDim.x)
    finish_channels(args, place_in(b, {kGroups, kLanes}));
  sync_grid();
}

template <class T, class Row>
__global__ void __launch_bounds__(kThreads, 2) persistent_forward(NormArgs a, StatsArgs stats, Work work) {
  const Kept<T> kept;
  int64_t first = 0;  // of a block's rows, among those that are kept
  for (int64_t b = blockIdx.x; b < work.blocks; b += gridDim.x, first += work.rows)
    stats_of_rows<T, true, 4>(a, work.split, place_in(b, work.split.block), work.partial,
                              [&](int64_t i, const Octet<T>& x) { kept.set(first + i, x); });
  finish(stats);
  first = 0;
  for (int64_t b = blockIdx.x; b < work.blocks; b += gridDim.x, first += work.rows)
    map_kept<T, Row, false>(a, work.split, place_in(b, work.split.block),
                            [&](int64_t i, Operands<T>& read) { read.x = kept.at(first + i); });
}

// from_first: what is kept of the gradient is that of the pre-activation, as the first pass stores it.
template <class T, class Row>
__global__ void __launch_bounds__(kThreads, 2)
    persistent_backward(NormArgs a, NormArgs second, SumsArgs sums, Work work, bool from_first) {
  using A = compute_t<T>;
  const Kept<T> kept;
  int64_t first = 0;
  for (int64_t b = blockIdx.x; b < work.blocks; b += gridDim.x, first += work.rows)
    sums_of_rows<T, NormSums<Row>, true>(a, work.split, place_in(b, work.split.block), work.partial,
                                         [&](int64_t i, const Operands<T>& read, const A(&g)[8]) {
                                           kept.set(2 * (first + i), read.x);
                                           Octet<T> grad = read.grad;
                                           if (from_first)
#pragma unroll
                                             for (int k = 0; k < 8; ++k) from_compute(g[k], grad.of[k]);
                                           kept.set(2 * (first + i) + 1, grad);
                                         });
  finish(sums);
  first = 0;
  for (int64_t b = blockIdx.x; b < work.blocks; b += gridDim.x, first += work.rows)
    map_kept<T, Row, true>(second, work.split, place_in(b, work.split.block), [&](int64_t i, Operands<T>& read) {
      read.x = kept.at(2 * (first + i));
      read.grad = kept.at(2 * (first + i) + 1);
    });
}

Work work_of(const NormArgs& a, const Split& s, double* partial) {
  const int64_t rows = (a.outer + s.over_outer - 1) / s.over_outer;
  return {s, rows_blocks(a, s), (rows + s.block.y - 1) / s.block.y, partial};
}

// f(kernel, bytes that are kept of an octet's operands) for a's dtype and activation, where there is a kernel for it.
template <bool backward, class F>
void with_kernel(const NormArgs& a, const F& f) {
  if (a.planar() || !whole_octets_only(a)) return;
  with_dtype(a.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if constexpr (!std::is_same_v<T, double>)
      with_common_act(a.act.kind, [&](auto row) {
        using Row = decltype(row);
        if constexpr (backward)
          f(persistent_backward<T, Row>, 2 * sizeof(Octet<T>));
        else
          f(persistent_forward<T, Row>, sizeof(Octet<T>));
      });
  });
}

template <class Kernel>
Together together_for(Kernel kernel, const Work& work, size_t bytes) {
  return together(kernel, kThreads, work.blocks, static_cast<size_t>(work.rows) * kThreads * bytes);
}

template <bool backward>
bool fits(const NormArgs& a) {
  bool found = false;
  const Work work = work_of(a, split(a, 1), nullptr);
  with_kernel<backward>(a, [&](auto kernel, size_t bytes) { found = together_for(kernel, work, bytes).fits(); });
  return found;
}

}  // namespace

bool norm_forward_fits(const NormArgs& a) { return fits<false>(a); }
bool norm_backward_fits(const NormArgs& a) { return fits<true>(a); }

void norm_forward(const NormArgs& a, const Split& s, const StatsArgs& stats, double* partial, Stream stream) {
  const Work work = work_of(a, s, partial);
  with_kernel<false>(a, [&](auto kernel, size_t bytes) {
    launch_together("norm_forward", kernel, together_for(kernel, work, bytes), kThreads, stream, a, stats, work);
  });
}

void norm_backward(const NormArgs& first, const NormArgs& second, const Split& s, const SumsArgs& sums, double* partial,
                   bool from_first, Stream stream) {
  const Work work = work_of(first, s, partial);
  with_kernel<true>(first, [&](auto kernel, size_t bytes) {
    launch_together("norm_backward", kernel, together_for(kernel, work, bytes), kThreads, stream, first, second, sums,
                    work, from_first);
  });
}

}  // namespace tsmem::cuda
