#include "conv_slabs.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "conv_args.h"

namespace tsmem {

using at::IntArrayRef;
using at::Tensor;

namespace {

bool makes_patches(const Tensor& input, const Tensor& weight, const ConvWindow& w) {
  using at::native::ConvBackend;
  const std::vector<int64_t> none(w.stride.size(), 0);
  const ConvBackend backend = conv_backend(input, weight, {w.stride.vec(), w.padding.vec(), w.dilation.vec(), none});
  // The dilated ones make the patches of one sample at a time themselves.
  return backend == ConvBackend::Slow2d || backend == ConvBackend::Slow3d;
}

// Rows of the output, those of the input that they are made from, and how many rows of zeros come before and after
// these.
struct Slab {
  int64_t out, count, in, rows, before, after;
  bool padded() const { return before > 0 || after > 0; }
};

// f(slab) for each.
template <class F>
void for_slabs(int64_t out_rows, int64_t in_rows, int64_t kernel, const ConvWindow& w, int64_t slabs, F f) {
  const int64_t each = (out_rows + slabs - 1) / slabs;
  for (int64_t out = 0; out < out_rows; out += each) {
    const int64_t count = std::min(each, out_rows - out), first = out * w.stride[0] - w.padding[0];
    const int64_t end = first + (count - 1) * w.stride[0] + w.dilation[0] * (kernel - 1) + 1;
    const int64_t in = std::clamp<int64_t>(first, 0, in_rows), stop = std::clamp<int64_t>(end, in, in_rows);
    const int64_t before = first < 0 ? std::min(-first, end - first) : 0;
    f(Slab{out, count, in, stop - in, before, end - first - before - (stop - in)});
  }
}

// What pads the first spatial dimension alone.
std::vector<int64_t> pad_of(const Slab& s, int64_t dims) {
  std::vector<int64_t> pad(2 * dims, 0);
  pad[2 * dims - 2] = s.before, pad[2 * dims - 1] = s.after;
  return pad;
}

Tensor input_of(const Tensor& input, const Slab& s) {
  const Tensor rows = input.narrow(2, s.in, s.rows);
  return s.padded() ? at::constant_pad_nd(rows, pad_of(s, input.dim() - 2)) : rows;
}

// The slabs have their zeros already.
std::vector<int64_t> other_padding(const ConvWindow& w) {
  std::vector<int64_t> padding = w.padding.vec();
  padding[0] = 0;
  return padding;
}

}  // namespace

int64_t conv_slabs(const Tensor& input, const Tensor& weight, const ConvWindow& w) {
  const int64_t kernel = c10::multiply_integers(weight.sizes().slice(2)), dims = weight.dim() - 2;
  // In 16 bits the sums over slabs would be rounded after each.
  if (!input.is_cpu() || !weight.is_cpu() || low_precision(input) || kernel == 1 || input.dim() != weight.dim() ||
      weight.size(1) != input.size(1))
    return 1;
  for (const IntArrayRef list : {w.stride, w.padding, w.dilation})
    if (static_cast<int64_t>(list.size()) != dims) return 1;
  for (int64_t d = 0; d < dims; ++d)
    if (w.stride[d] <= 0 || w.dilation[d] <= 0 || w.padding[d] < 0) return 1;
  const std::vector<int64_t> none(dims, 0);
  const auto out = conv_output_size(input, weight, w.stride, w.padding, w.dilation, false, none, 1);
  if (std::any_of(out.begin(), out.end(), [](int64_t size) { return size <= 0; })) return 1;
  const int64_t per_channel = out[0] * c10::multiply_integers(IntArrayRef(out).slice(2));
  // Of a slab's patches: what a core's caches hold, and enough to do for every thread.
  const int64_t least = std::max<int64_t>(4, at::get_num_threads()) << 20;
  const int64_t patches = per_channel * weight.size(1) * kernel * static_cast<int64_t>(input.element_size());
  if (patches < 2 * least || !makes_patches(input, weight, w)) return 1;
  return std::min(patches / least, out[2]);
}

Tensor conv_by_slabs(const Tensor& input, const Tensor& weight, const OptTensor& bias, const ConvWindow& w,
                     int64_t slabs) {
  const std::vector<int64_t> none(w.stride.size(), 0), padding = other_padding(w);
  const auto sizes = conv_output_size(input, weight, w.stride, w.padding, w.dilation, false, none, 1);
  Tensor out = at::empty(sizes, input.options());
  for_slabs(sizes[2], input.size(2), weight.size(2), w, slabs, [&](const Slab& s) {
    out.narrow(2, s.out, s.count)
        .copy_(at::convolution(input_of(input, s), weight, bias, w.stride, padding, w.dilation, false, none, 1));
  });
  return out;
}

std::array<Tensor, 3> conv_backward_by_slabs(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                             at::OptionalIntArrayRef bias_sizes, const ConvWindow& w,
                                             std::array<bool, 3> want, int64_t slabs) {
  const std::vector<int64_t> none(w.stride.size(), 0), padding = other_padding(w);
  std::array<Tensor, 3> sum;
  if (want[0]) sum[0] = at::zeros(input.sizes(), grad.options());
  for_slabs(grad.size(2), input.size(2), weight.size(2), w, slabs, [&](const Slab& s) {
    Tensor x;
    if (want[1]) {
      x = input_of(input, s);
    } else {  // its shape alone is read
      auto sizes = input.sizes().vec();
      sizes[2] = s.before + s.rows + s.after;
      x = shape_of(sizes, c10::contiguous_strides(sizes), grad.options());
    }
    const auto [dx, dw, db] = at::convolution_backward(grad.narrow(2, s.out, s.count), x, weight, bias_sizes, w.stride,
                                                       padding, w.dilation, false, none, 1, want);
    if (want[0]) sum[0].narrow(2, s.in, s.rows).add_(dx.narrow(2, s.before, s.rows));
    if (want[1]) sum[1] = sum[1].defined() ? sum[1].add_(dw) : dw;
    if (want[2]) sum[2] = sum[2].defined() ? sum[2].add_(db) : db;
  });
  return sum;
}

}  // namespace tsmem
