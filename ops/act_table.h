// The table of activations: a row each, a struct with its name in schemas, what it saves for backward, PyTorch's
// operator, and its formulas. A new activation takes three places: its name in ActKind (act.h), its row here, and that
// row in the list ActTable below, in ActKind's order. Parsing, PyTorch's operator for what has no kernel, the kernels
// of CPU and CUDA, and the patterns follow from these.
//
// Formulas are for one element of type A: float (also for bf16 and f16) or double. M has the elementary functions
// (cpu/act_math.h, cuda/act_math.h). They compute both sides of a choice before they choose, so that loops are
// vectorised. Borders and NaN are PyTorch's: docs/ops/norm.md.
#pragma once
#include <cstddef>

#include "act.h"

#ifdef __CUDACC__
#define TSMEM_FORMULA static __device__ inline
#else
#define TSMEM_FORMULA static inline __attribute__((always_inline))
#endif

namespace tsmem {

// What backward needs of an activation: nothing, one bit an element (the derivative has two values), its input, or its
// output.
enum class ActSaves { nothing, bit, input, output };

// An activation's arguments as its formulas have them.
template <class A>
struct ActNumbers {
  A a, b, c;
};
template <class A>
TSMEM_FORMULA ActNumbers<A> numbers_of(const Act& act) {
  return {static_cast<A>(act.a), static_cast<A>(act.b), static_cast<A>(act.c)};
}

namespace acts {

// What most rows have in common.
struct Row {
  static constexpr const char* operator_name = nullptr;  // of PyTorch, without "aten::", where it is not `name`
  static constexpr const char* approximate = nullptr;    // that argument of PyTorch's operator, where it has one
  static constexpr int arguments = 0;
  static constexpr ActSaves saves = ActSaves::input;
  static constexpr bool scripted_in_float = false;  // TorchScript's autocast runs it in float32
  static constexpr bool faster_here = false;        // our CPU kernel is faster than PyTorch's
};

struct Identity : Row {
  static constexpr ActKind kind = ActKind::identity;
  static constexpr const char* name = "identity";
  static constexpr ActSaves saves = ActSaves::nothing;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return x;
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A, A g, ActNumbers<A>) {
    return g;
  }
};

// The derivative is `slope` where upper() holds, which is the bit, and elsewhere 0, or, with lower_slope, argument a.
struct OneBit : Row {
  static constexpr ActSaves saves = ActSaves::bit;
  static constexpr double slope = 1;
  static constexpr bool lower_slope = false;
};

struct Relu : OneBit {
  static constexpr ActKind kind = ActKind::relu;
  static constexpr const char* name = "relu";
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return M::relu_of(x);
  }
  template <class A>
  TSMEM_FORMULA bool upper(A x, ActNumbers<A>) {
    return !(x <= A(0));
  }
};

struct Hardtanh : OneBit {  // a: lowest, b: highest value
  static constexpr ActKind kind = ActKind::hardtanh;
  static constexpr const char* name = "hardtanh";
  static constexpr int arguments = 2;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A> p) {
    const A low = x < p.a ? p.a : x;
    return low > p.b ? p.b : low;
  }
  template <class A>
  TSMEM_FORMULA bool upper(A x, ActNumbers<A> p) {
    return !(x <= p.a) & !(x >= p.b);
  }
};

struct Threshold : OneBit {  // a: threshold, b: the value below
  static constexpr ActKind kind = ActKind::threshold;
  static constexpr const char* name = "threshold";
  static constexpr int arguments = 2;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A> p) {
    return x <= p.a ? p.b : x;
  }
  template <class A>
  TSMEM_FORMULA bool upper(A x, ActNumbers<A> p) {
    return !(x <= p.a);
  }
};

struct LeakyRelu : OneBit {  // a: slope below 0
  static constexpr ActKind kind = ActKind::leaky_relu;
  static constexpr const char* name = "leaky_relu";
  static constexpr int arguments = 1;
  static constexpr bool lower_slope = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A> p) {
    const A scaled = x * p.a;
    return x > A(0) ? x : scaled;
  }
  template <class A>
  TSMEM_FORMULA bool upper(A x, ActNumbers<A>) {
    return x > A(0);
  }
};

struct Hardsigmoid : OneBit {
  static constexpr ActKind kind = ActKind::hardsigmoid;
  static constexpr const char* name = "hardsigmoid";
  // Exactly rounded in float64 too, as in TorchScript's own derivative.
  static constexpr double slope = 1.0 / 6.0;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
    return M::sixth_of(mid + A(3));
  }
  template <class A>
  TSMEM_FORMULA bool upper(A x, ActNumbers<A>) {
    return (x > A(-3)) & (x < A(3));
  }
};

// In eager mode, whose constant is a float32 in float64 too (ATen/native/cpu/Activation.cpp).
struct HardsigmoidEager : Hardsigmoid {
  static constexpr ActKind kind = ActKind::hardsigmoid_eager;
  static constexpr const char* name = "hardsigmoid_eager";
  static constexpr const char* operator_name = "hardsigmoid";
  static constexpr double slope = 1.0f / 6.0f;
};

struct Silu : Row {
  static constexpr ActKind kind = ActKind::silu;
  static constexpr const char* name = "silu";
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return x / (A(1) + M::exp_of(-x));
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A s = M::sigmoid_of(x);
    return g * s * (A(1) + x * (A(1) - s));
  }
};

struct Hardswish : Row {
  static constexpr ActKind kind = ActKind::hardswish;
  static constexpr const char* name = "hardswish";
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    const A low = x < A(-3) ? A(-3) : x, mid = low > A(3) ? A(3) : low;
    return M::sixth_of(x * (mid + A(3)));
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A inside = g * (x / A(3) + A(0.5)), low = x <= A(-3) ? A(0) : g;  // NaN passes the gradient
    const A in = x < A(3) ? inside : g;
    return x > A(-3) ? in : low;
  }
};

struct Gelu : Row {
  static constexpr ActKind kind = ActKind::gelu;
  static constexpr const char *name = "gelu", *approximate = "none";
  static constexpr bool scripted_in_float = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return x * M::phi_of(x, M::gauss_of(x));
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A gauss = M::gauss_of(x);
    return g * (M::phi_of(x, gauss) + x * (A(0.39894228040143267794) * gauss));
  }
};

struct GeluTanh : Row {
  static constexpr ActKind kind = ActKind::gelu_tanh;
  static constexpr const char *name = "gelu_tanh", *operator_name = "gelu", *approximate = "tanh";
  static constexpr bool scripted_in_float = true, faster_here = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    const A inner = A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);
    return A(0.5) * x * (A(1) + M::tanh_of(inner));
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A t = M::tanh_of(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x));
    const A inner = A(0.79788456080286535588) * (A(1) + A(3 * 0.044715) * x * x);
    return g * (A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner);
  }
};

struct Sigmoid : Row {
  static constexpr ActKind kind = ActKind::sigmoid;
  static constexpr const char* name = "sigmoid";
  static constexpr ActSaves saves = ActSaves::output;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return M::sigmoid_of(x);
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A s = M::sigmoid_of(x);
    return g * (A(1) - s) * s;
  }
};

struct Tanh : Row {
  static constexpr ActKind kind = ActKind::tanh;
  static constexpr const char* name = "tanh";
  static constexpr ActSaves saves = ActSaves::output;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    return M::tanh_of(x);
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A t = M::tanh_of(x);
    return g * (A(1) - t * t);
  }
};

struct Elu : Row {  // a: alpha, b: scale, c: scale of the input
  static constexpr ActKind kind = ActKind::elu;
  static constexpr const char* name = "elu";
  static constexpr int arguments = 3;
  static constexpr bool faster_here = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A> p) {
    const A lower = M::expm1_of(x * p.c) * (p.a * p.b), upper = x * p.b;
    return x <= A(0) ? lower : upper;
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A> p) {
    const A c = scale_in_backward(p);
    const A lower = g * c * (p.a * p.b) * M::exp_of(x * c), upper = g * p.b;
    return x <= A(0) ? lower : upper;
  }
  // Of celu, PyTorch's gradient rounds alpha to float32 (derivatives.yaml), and its forward does not.
  template <class A>
  TSMEM_FORMULA A scale_in_backward(ActNumbers<A> p) {
    const bool celu = (p.b == A(1)) & (p.c == A(1) / p.a);
    return celu ? A(1) / static_cast<A>(static_cast<float>(p.a)) : p.c;
  }
};

struct Softplus : Row {  // a: beta, b: threshold
  static constexpr ActKind kind = ActKind::softplus;
  static constexpr const char* name = "softplus";
  static constexpr int arguments = 2;
  static constexpr bool scripted_in_float = true, faster_here = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A> p) {
    const A z = x * p.a, soft = M::log1p_of(M::exp_of(z)) / p.a;
    return z > p.b ? x : soft;
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A> p) {
    const A z = x * p.a, e = M::exp_of(z > p.b ? p.b : z), soft = g * (e / (e + A(1)));
    return z > p.b ? g : soft;
  }
};

struct Mish : Row {
  static constexpr ActKind kind = ActKind::mish;
  static constexpr const char* name = "mish";
  static constexpr bool faster_here = true;
  template <class M, class A>
  TSMEM_FORMULA A forward(A x, ActNumbers<A>) {
    const A e = M::exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2)), soft = x * (n / (n + A(2)));
    return x > A(40) ? x : soft;
  }
  template <class M, class A>
  TSMEM_FORMULA A backward(A x, A g, ActNumbers<A>) {
    const A e = M::exp_of(x > A(40) ? A(40) : x), n = e * (e + A(2)), d = n + A(2);
    const A soft = g * (n / d + x * (A(4) * e * (e + A(1)) / d / d));
    return x > A(40) ? g : soft;
  }
};

}  // namespace acts

template <class... Row>
struct ActRows {};
// In the order of ActKind.
using ActTable = ActRows<acts::Identity, acts::Relu, acts::Hardtanh, acts::Threshold, acts::LeakyRelu,
                         acts::Hardsigmoid, acts::Silu, acts::Hardswish, acts::Gelu, acts::GeluTanh, acts::Sigmoid,
                         acts::Tanh, acts::Elu, acts::Softplus, acts::Mish, acts::HardsigmoidEager>;

// Calls f with the row of a kind.
template <class F, class... Row>
TSMEM_FORMULA void with_row(ActKind kind, const F& f, ActRows<Row...>) {
  (void)((kind == Row::kind && (f(Row{}), true)) || ...);
}
template <class F>
TSMEM_FORMULA void with_row(ActKind kind, const F& f) {
  with_row(kind, f, ActTable());
}

// g times the derivative at x.
template <class Row, class M, class A>
TSMEM_FORMULA A act_gradient(A x, A g, ActNumbers<A> p) {
  if constexpr (Row::saves == ActSaves::bit) {
    const A above = Row::slope == 1 ? g : g * A(Row::slope), below = Row::lower_slope ? g * p.a : A(0);
    return Row::upper(x, p) ? above : below;
  } else {
    return Row::template backward<M>(x, g, p);
  }
}

// The two derivatives of a one_bit() activation.
struct Slopes {
  double on = 1, off = 0;
};
template <class Row>
TSMEM_FORMULA Slopes slopes_of(const Act& act) {
  if constexpr (Row::saves == ActSaves::bit)
    return {Row::slope, Row::lower_slope ? act.a : 0.0};
  else
    return {};
}

// What of a row is no formula, for code that loops over the table or knows the kind at run time.
struct ActInfo {
  ActKind kind;
  const char* name;
  const char* operator_name;  // of PyTorch, without "aten::"; null for identity
  const char* approximate;    // that argument of it, or null
  int arguments;
  ActSaves saves;
  bool scripted_in_float, faster_here;
};
template <class Row>
constexpr ActInfo act_info() {
  const char* own = Row::saves == ActSaves::nothing ? nullptr : Row::name;
  return {Row::kind,
          Row::name,
          Row::operator_name ? Row::operator_name : own,
          Row::approximate,
          Row::arguments,
          Row::saves,
          Row::scripted_in_float,
          Row::faster_here};
}
template <class Rows>
struct ActInfos;
template <class... Row>
struct ActInfos<ActRows<Row...>> {
  static constexpr ActInfo values[] = {act_info<Row>()...};
  static constexpr bool in_order() {
    int32_t i = 0;
    return ((static_cast<int32_t>(Row::kind) == i++) && ...);
  }
};
static_assert(ActInfos<ActTable>::in_order());
inline constexpr auto& kActivations = ActInfos<ActTable>::values;

constexpr const ActInfo& info_of(ActKind kind) { return kActivations[static_cast<size_t>(kind)]; }
// Whether it is celu, and PyTorch's gradient of that has another alpha than its forward.
inline bool is_celu(const Act& act) {
  return act.kind == ActKind::elu && act.b == 1 && act.c == 1 / act.a && static_cast<float>(act.a) != act.a;
}
// True where the derivative is a function of one bit an element: 0 or a constant.
constexpr bool one_bit(ActKind kind) { return info_of(kind).saves == ActSaves::bit; }

}  // namespace tsmem
