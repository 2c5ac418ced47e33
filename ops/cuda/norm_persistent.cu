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

// The octets that a thread has read, in the block's dynamic memory, and taken in the order in which they were put. No
// other thread sees them, so nothing waits. Threads beside each other have words of 16 bytes beside each other.
template <class T>
struct Kept {
  static constexpr unsigned kWords = sizeof(Octet<T>) / 16;
  unsigned next = threadIdx.x;
  __device__ void put(const Octet<T>& octet) {
    uint4 words[kWords];
    memcpy(words, &octet, sizeof(octet));
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w) dynamic_shared()[next + w * kThreads] = words[w];
    next += kWords * kThreads;
  }
  __device__ Octet<T> take() {
    uint4 words[kWords];
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w) words[w] = dynamic_shared()[next + w * kThreads];
    next += kWords * kThreads;
    Octet<T> octet;
    memcpy(&octet, words, sizeof(octet));
    return octet;
  }
};

// How the grid's blocks share the work.
struct Work {
  Split split;
  unsigned blocks = 0;  // of a pass
  unsigned rows = 0;    // that a thread has of one, at most
  double* partial = nullptr;
};

// Reads under way, backward fewer than in the passes: the kernel holds more beside them, and two operands are read.
template <class T, class Row>
constexpr int kSumsBatch = (kMapBatch<T, Row> + 1) / 2;
// In the second part: of what was not kept, which is nothing for SiLU without a residual.
template <class T, class Row, bool backward>
constexpr int kKeptBatch = !backward                         ? kMapBatch<T, Row>
                           : std::is_same_v<Row, acts::Silu> ? 1
                                                             : kSumsBatch<T, Row>;

template <class Row>
struct SumsOnChip : NormSums<Row> {
  template <class T>
  static constexpr int batch = kSumsBatch<T, Row>;
};

// map_rows() of the rows that `at` has had its sums of. take(operands): what was kept of the next row.
template <class T, class Row, bool backward, class Take>
__device__ inline void map_kept(const NormArgs& a, const Split& s, const Place& at, const Take& take) {
  using A = compute_t<T>;
  constexpr int batch = kKeptBatch<T, Row, backward>;
  const RowsBlock b(a, s, at);
  if (b.width == 0) return;
  Channel<A> ch[8];
  A tilt[8], level[8];
  eight_channels(a, b.c, ch);
  if (backward) eight_numbers(a.tilt, b.c, tilt), eight_numbers(a.level, b.c, level);
  const auto step = static_cast<int32_t>(at.high), channels = static_cast<int32_t>(a.channels);
  const auto c = static_cast<int32_t>(b.c), end = static_cast<int32_t>(b.r1);
  for (auto r = static_cast<int32_t>(b.r0 + at.y); r < end; r += batch * step) {
    Operands<T> read[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u)
      if (r + u * step < end)
        read_beside<T, Row, true, backward>(a, (r + u * step) * channels + c, true, 0, 8, read[u]);
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      if (r + u * step >= end) continue;
      take(read[u]);
      map_octet<T, Row, true, backward>(a, read[u], (r + u * step) * channels + c, 8, ch, tilt, level);
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
  Kept<T> kept;
  for (unsigned b = blockIdx.x; b < work.blocks; b += gridDim.x)
    stats_of_rows<T, true, 4>(a, work.split, place_in(b, work.split.block), work.partial,
                              [&](const Octet<T>& x) { kept.put(x); });
  finish(stats);
  kept = {};
  for (unsigned b = blockIdx.x; b < work.blocks; b += gridDim.x)
    map_kept<T, Row, false>(a, work.split, place_in(b, work.split.block),
                            [&](Operands<T>& read) { read.x = kept.take(); });
}

// from_first: what is kept of the gradient is that of the pre-activation, as the first pass stores it.
template <class T, class Row>
__global__ void __launch_bounds__(kThreads, 2)
    persistent_backward(NormArgs a, NormArgs second, SumsArgs sums, Work work, bool from_first) {
  using A = compute_t<T>;
  Kept<T> kept;
  const auto keep = [&](const Operands<T>& read, const A(&g)[8]) {
    Octet<T> grad = read.grad;
    if (from_first)
#pragma unroll
      for (int k = 0; k < 8; ++k) from_compute(g[k], grad.of[k]);
    kept.put(grad);
    kept.put(read.x);
  };
  for (unsigned b = blockIdx.x; b < work.blocks; b += gridDim.x)
    sums_of_rows<T, SumsOnChip<Row>, true, int32_t>(a, work.split, place_in(b, work.split.block), work.partial, keep);
  finish(sums);
  kept = {};
  for (unsigned b = blockIdx.x; b < work.blocks; b += gridDim.x)
    map_kept<T, Row, true>(second, work.split, place_in(b, work.split.block), [&](Operands<T>& read) {
      read.grad = kept.take();
      read.x = kept.take();
    });
}

Work work_of(const NormArgs& a, const Split& s, double* partial) {
  const int64_t rows = (a.outer + s.over_outer - 1) / s.over_outer;
  return {s, static_cast<unsigned>(rows_blocks(a, s)), static_cast<unsigned>((rows + s.block.y - 1) / s.block.y),
          partial};
}

// f(kernel, bytes that are kept of an octet's operands) for a's dtype and activation, where there is a kernel for it.
template <bool backward, class F>
void with_kernel(const NormArgs& a, const F& f) {
  if (!norm_can_be_kept(a)) return;
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
  return together(kernel, kThreads, work.blocks, size_t{work.rows} * kThreads * bytes);
}

template <bool backward>
bool fits(const NormArgs& a) {
  bool found = false;
  const Work work = work_of(a, split(a, 1), nullptr);
  with_kernel<backward>(a, [&](auto kernel, size_t bytes) { found = together_for(kernel, work, bytes).fits(); });
  return found;
}

}  // namespace

bool norm_can_be_kept(const NormArgs& a) {
  return !a.planar() && whole_octets_only(a) && a.dtype != Dtype::f64 && a.numel <= INT32_MAX;
}
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
