// What the CPU's baseline kernels compute from the same numbers on every processor, a line a result: its name, then its
// values. test_arm64.py compares the lines of this machine and of arm64.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "act_table.h"
#include "cpu/kernels.h"
#include "cpu/mask.h"
#include "cpu/norm.h"
#include "cpu/pool.h"
#include "cpu/prelu.h"
#include "cpu/product.h"
#include "cpu/smooth_act.h"

namespace tsmem {

namespace baseline {
extern const Kernels all_kernels;
}

namespace {

const Kernels& kernels = baseline::all_kernels;
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16};
constexpr const char* kNames[] = {"f32", "f64", "bf16", "f16"};

int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// Sixteenths from -4 to 4, which every dtype has exactly.
double number(int64_t i, int64_t seed) { return static_cast<double>((i * 7919 + seed * 104729) % 129 - 64) / 16; }

uint16_t half_bits(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent);  // in [.5, 1)
  const auto mantissa = static_cast<uint16_t>(std::ldexp(fraction, 11) - 1024);
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | mantissa);
}

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                     : std::ldexp(mantissa, -24);
  return bits >> 15 ? -size : size;
}

// n elements of a dtype, as the kernels read and write them.
struct Values {
  Dtype dtype;
  std::vector<char> bytes;
  Values(Dtype dtype, int64_t n) : dtype(dtype), bytes(n * size_of(dtype)) {}
  Values(Dtype dtype, int64_t n, int64_t seed) : Values(dtype, n) {
    for (int64_t i = 0; i < n; ++i) set(i, number(i, seed));
  }
  void* data() { return bytes.data(); }
  void set(int64_t i, double value) {
    const auto narrow = static_cast<float>(value);
    uint32_t bits = 0;
    std::memcpy(&bits, &narrow, 4);
    const auto upper = static_cast<uint16_t>(bits >> 16), half = half_bits(value);
    const void* from = dtype == Dtype::f64    ? static_cast<const void*>(&value)
                       : dtype == Dtype::f32  ? static_cast<const void*>(&narrow)
                       : dtype == Dtype::bf16 ? static_cast<const void*>(&upper)
                                              : static_cast<const void*>(&half);
    std::memcpy(&bytes[i * size_of(dtype)], from, size_of(dtype));
  }
  double get(int64_t i) const {
    const char* at = &bytes[i * size_of(dtype)];
    double wide = 0;
    float narrow = 0;
    uint16_t bits = 0;
    if (dtype == Dtype::f64) return std::memcpy(&wide, at, 8), wide;
    if (dtype == Dtype::f32) return std::memcpy(&narrow, at, 4), narrow;
    std::memcpy(&bits, at, 2);
    if (dtype == Dtype::f16) return half_value(bits);
    const uint32_t shifted = uint32_t{bits} << 16;
    return std::memcpy(&narrow, &shifted, 4), narrow;
  }
  int64_t size() const { return static_cast<int64_t>(bytes.size()) / size_of(dtype); }
};

// Numbers per channel are double for f64, else float.
Dtype per_channel(Dtype dtype) { return dtype == Dtype::f64 ? dtype : Dtype::f32; }

void print(const std::string& name, Dtype dtype, int64_t n, const std::function<double(int64_t)>& value) {
  std::printf("%s %s", name.c_str(), kNames[static_cast<int>(dtype)]);
  for (int64_t i = 0; i < n; ++i) std::printf(" %.17g", value(i));
  std::printf("\n");
}
void print(const std::string& name, const Values& v) {
  print(name, v.dtype, v.size(), [&](int64_t i) { return v.get(i); });
}
template <class T>
void print(const std::string& name, Dtype dtype, const std::vector<T>& v) {
  print(name, dtype, static_cast<int64_t>(v.size()), [&](int64_t i) { return static_cast<double>(v[i]); });
}

Act act_like(const ActInfo& info) {
  Act act{info.kind};
  if (info.kind == ActKind::hardtanh)
    act.a = -1, act.b = 2;
  else if (info.kind == ActKind::threshold)
    act.a = .5, act.b = -2;
  else if (info.kind == ActKind::leaky_relu)
    act.a = .125;
  else if (info.kind == ActKind::elu)
    act.a = 1.5, act.b = 1, act.c = 1;
  else if (info.kind == ActKind::softplus)
    act.a = 1, act.b = 20;
  return act;
}

void activations(Dtype dtype) {
  const int64_t n = 517;
  Values x(dtype, n, 1), grad(dtype, n, 2), out(dtype, n);
  for (const ActInfo& info : kActivations) {
    const Act act = act_like(info);
    const std::string name(info.name);
    if (one_bit(act.kind)) {
      std::vector<uint8_t> mask((n + 7) / 8);
      const bool writes = mask_writes_output(act.kind);
      kernels.mask->pack(dtype, act, x.data(), writes ? out.data() : nullptr, mask.data(), n);
      if (writes) print(name + ".pack", out);
      kernels.mask->apply(dtype, act, grad.data(), mask.data(), out.data(), n);
      print(name + ".apply", out);
    } else if (info.saves == ActSaves::input) {
      kernels.smooth_act->forward(dtype, act, x.data(), out.data(), n);
      print(name + ".forward", out);
      kernels.smooth_act->backward(dtype, act, x.data(), grad.data(), out.data(), n);
      print(name + ".backward", out);
    }
  }
}

// The arguments of a norm over [4, channels, inner], or over rows where inner is 1.
struct Norm {
  static constexpr int64_t kPeriod = 240;  // of 5 or 3 channels, and of 16
  Values x, other, grad, out, grad_other, mean, scale, bias, slope, tilt, level;
  std::vector<uint8_t> mask;
  NormArgs args;
  Norm(Dtype dtype, int64_t outer, int64_t channels, int64_t inner, ActKind kind)
      : x(dtype, outer * channels * inner, 3),
        other(dtype, x.size(), 4),
        grad(dtype, x.size(), 5),
        out(dtype, x.size()),
        grad_other(dtype, x.size()),
        mean(table(dtype, channels, 6)),
        scale(table(dtype, channels, 7)),
        bias(table(dtype, channels, 8)),
        slope(table(dtype, channels, 9)),
        tilt(table(dtype, channels, 10)),
        level(table(dtype, channels, 11)) {
    args.dtype = dtype;
    args.outer = outer, args.channels = channels, args.inner = inner;
    if (inner == 1) args.period = kPeriod;
    args.act = act_like(info_of(kind));
    args.x = x.data(), args.other = other.data(), args.out = out.data(), args.grad = grad.data();
    args.mean = mean.data(), args.scale = scale.data(), args.bias = bias.data();
    args.slope = slope.data(), args.tilt = tilt.data(), args.level = level.data();
    mask.resize(args.mask_bytes());
  }
  static Values table(Dtype dtype, int64_t channels, int64_t seed) {
    Values v(per_channel(dtype), kPeriod);
    for (int64_t i = 0; i < kPeriod; ++i) v.set(i, number(i % channels, seed) / 2);
    return v;
  }
};

void norms(Dtype dtype, bool planar, ActKind kind) {
  const int64_t channels = 5;
  Norm n(dtype, planar ? 4 : 56, channels, planar ? 37 : 1, kind);
  const std::string name = std::string("norm.") + info_of(kind).name + (planar ? ".planar" : ".rows");
  const NormRange all{0, n.args.outer, 0, channels};
  std::vector<double> a(channels), b(channels);
  kernels.norm->stats(n.args, all, a.data(), b.data());
  print(name + ".mean", dtype, a), print(name + ".m2", dtype, b);
  for (int64_t c = 0; c < channels; ++c) kernels.norm->exact_stats(n.args, c, &a[c], &b[c]);
  print(name + ".exact_mean", dtype, a), print(name + ".exact_m2", dtype, b);

  NormArgs forward = n.args;
  if (one_bit(kind)) forward.mask = n.mask.data();
  kernels.norm->apply(forward, all);
  print(name + ".apply", n.out);

  NormArgs backward = n.args;
  backward.grad_other = n.grad_other.data();
  a.assign(channels, 0), b.assign(channels, 0);
  kernels.norm->reduce(backward, all, a.data(), b.data());
  print(name + ".sum", dtype, a), print(name + ".dot", dtype, b), print(name + ".grad_other", n.grad_other);
  kernels.norm->grad(n.args, all);
  print(name + ".grad", n.out);
}

void pooled_norms(Dtype dtype, bool rows) {
  const int64_t images = 4, channels = 3, height = 6, width = 7, out_height = 3, out_width = 4;
  Norm n(dtype, rows ? images * height * width : images, channels, rows ? 1 : height * width, ActKind::relu);
  NormPoolArgs p;
  n.args.other = nullptr;
  Values pooled(dtype, images * channels * out_height * out_width), grad(dtype, pooled.size(), 12);
  std::vector<uint8_t> positions(pooled.size());
  n.args.out = pooled.data();
  p.norm = n.args;
  p.rows = rows;
  p.images = images, p.height = height, p.width = width, p.out_height = out_height, p.out_width = out_width;
  for (int d : {0, 1}) p.kernel[d] = 3, p.stride[d] = 2, p.padding[d] = 1;
  p.positions = positions.data();
  const int64_t planes = rows ? images : images * channels;
  const std::string name = rows ? "norm_pool.rows" : "norm_pool.planar";
  kernels.norm_pool->forward(p, 0, planes);
  print(name + ".forward", pooled), print(name + ".positions", dtype, positions);
  Values again(dtype, pooled.size());
  p.norm.out = again.data();
  kernels.norm_pool->again(p, 0, planes);
  print(name + ".again", again);
  p.norm.grad = grad.data();
  std::vector<double> sum(channels), dot(channels);
  kernels.norm_pool->reduce(p, 0, planes, sum.data(), dot.data());
  print(name + ".sum", dtype, sum), print(name + ".dot", dtype, dot);
  p.norm.out = n.out.data();
  kernels.norm_pool->grad(p, 0, planes);
  print(name + ".grad", n.out);
}

// Windows of 3 with stride 2 and padding 1.
struct Axis {
  std::vector<int64_t> start, first, last;
  PoolAxis axis;
  explicit Axis(int64_t in) {
    axis.in = in, axis.out = (in - 1) / 2 + 1, axis.window = 3, axis.stride = 2;
    for (int64_t o = 0; o < axis.out; ++o) {
      start.push_back(2 * o - 1);
      first.push_back(start[o] < 0 ? 1 : 0);
      last.push_back(start[o] + 3 > in ? in - start[o] : 3);
    }
    axis.start = start.data(), axis.first = first.data(), axis.last = last.data();
  }
};

void pools(Dtype dtype, bool channels_last) {
  const int64_t batch = 2, channels = 19;
  static constexpr int64_t kZero = 0, kOne = 1;
  const Axis h(9), w(21);
  PoolArgs p{dtype, 1, channels_last, batch, channels, {}, h.axis, w.axis};
  p.d.start = &kZero, p.d.first = &kZero, p.d.last = &kOne;
  Values x(dtype, batch * channels * h.axis.in * w.axis.in, 13);
  Values y(dtype, batch * channels * h.axis.out * w.axis.out), grad(dtype, y.size(), 14), grad_x(dtype, x.size());
  std::vector<uint8_t> position(y.size());
  const std::string name = channels_last ? "pool.channels_last" : "pool.planar";
  const int64_t rows = batch * h.axis.out * (channels_last ? 1 : channels);
  kernels.pool->forward(p, x.data(), y.data(), position.data(), 0, rows);
  print(name + ".forward", y), print(name + ".positions", dtype, position);
  kernels.pool->backward(p, 1, grad.data(), position.data(), grad_x.data(), 0,
                         channels_last ? batch : batch * channels);
  print(name + ".backward", grad_x);
}

void prelus(Dtype dtype, int64_t inner) {
  const int64_t channels = 5, n = 3 * channels * inner * (inner == 1 ? 11 : 1);
  Values x(dtype, n, 15), grad(dtype, n, 16), out(dtype, n), weight(per_channel(dtype), channels, 17);
  const PreluArgs p{dtype, channels, inner, weight.data(), x.data(), grad.data(), out.data()};
  const std::string name = inner == 1 ? "prelu.rows" : "prelu.planar";
  kernels.prelu->forward(p, 0, n);
  print(name + ".forward", out);
  std::vector<double> sums(channels);
  kernels.prelu->backward(p, 0, n, sums.data());
  print(name + ".backward", out), print(name + ".sums", dtype, sums);
}

// More rows, terms and columns than one block has.
void products(Dtype dtype) {
  const int64_t rows = 7, depth = 131, columns = 37, each = kernels.product->panel_columns(dtype),
                panels = (columns + each - 1) / each;
  Values a(dtype, rows * depth, 18), b(dtype, depth * columns, 19), start(dtype, columns, 20),
      packed(dtype, panels * depth * each), out(dtype, rows * columns);
  kernels.product->pack(dtype, b.data(), 1, depth, depth, columns, packed.data(), 0, panels);
  const ProductArgs p{
      dtype, rows, depth, columns, {a.data(), depth}, packed.data(), {start.data(), 0}, {out.data(), columns}};
  kernels.product->multiply(p, 0, panels);
  print("product", out);
}

}  // namespace
}  // namespace tsmem

int main() {
  using namespace tsmem;
  for (const Dtype dtype : kDtypes) {
    activations(dtype);
    if (dtype == Dtype::f32 || dtype == Dtype::f64) products(dtype);
    for (const bool planar : {true, false}) {
      for (const ActKind kind :
           {ActKind::identity, ActKind::relu, ActKind::hardtanh, ActKind::leaky_relu, ActKind::silu})
        norms(dtype, planar, kind);
      pooled_norms(dtype, !planar);
      pools(dtype, !planar);
      prelus(dtype, planar ? 37 : 1);
    }
  }
}
