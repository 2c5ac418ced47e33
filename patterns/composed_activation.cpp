#include "patterns/all.h"

namespace tsmem {

namespace {

using Lines = std::vector<std::string>;

// Every line of `a` before every one of `b`.
Lines each(const Lines& a, const Lines& b) {
  Lines all;
  for (const std::string& x : a)
    for (const std::string& y : b) all.push_back(x + y);
  return all;
}

Lines either(Lines a, const Lines& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// %z = %x times %t, and half or a sixth of it: in the order in which a program multiplies. `scale`: the operators that
// scale a tensor so.
Lines product(const Lines& scale) {
  Lines all;
  for (const std::string& s : scale) {
    const auto scaled = [&](const std::string& z, const std::string& x) {
      return z + " = " + s.substr(0, s.find('(') + 1) + x + ", " + s.substr(s.find('(') + 1) + "\n";
    };
    all.push_back(scaled("%h", "%x") + "%z = mul(%h, %t)");
    all.push_back(scaled("%h", "%t") + "%z = mul(%x, %h)");
    all.push_back("%h = mul(%x, %t)\n" + scaled("%z", "%h"));
  }
  return all;
}

const Lines kHalf = {"mul(0.5)", "div(2)"}, kSixth = {"div(6)", "mul(0.16666666666666666)"};
const std::string kCubic = "0.044715";

// %u = sqrt(2 / pi) (x + 0.044715 x^3), without and with pow.
Lines inner(const Lines& cubes, const Lines& squares) {
  Lines all;
  for (const std::string root : {"0.7978845608028654", "0.7978845608"}) {
    all = either(all, each(cubes, {"%i = add(%x, %q)\n%u = mul(%i, " + root + ")\n"}));
    const Lines factored = each(squares, {"%w = add(%q, 1)\n"});
    all = either(all, each(factored, {"%k = mul(%x, " + root + ")\n%u = mul(%k, %w)\n",
                                      "%k = mul(%w, " + root + ")\n%u = mul(%x, %k)\n",
                                      "%k = mul(%x, %w)\n%u = mul(%k, " + root + ")\n"}));
  }
  return all;
}

// %q = 0.044715 x^3
const Lines kCubesByPow = {"%p = pow(%x, 3)\n%q = mul(%p, " + kCubic + ")\n",
                           "%p = pow(%x, 2)\n%l = mul(%p, %x)\n%q = mul(%l, " + kCubic + ")\n",
                           "%p = pow(%x, 2)\n%l = mul(%p, " + kCubic + ")\n%q = mul(%l, %x)\n"};
const Lines kCubes = {"%s = mul(%x, %x)\n%p = mul(%s, %x)\n%q = mul(%p, " + kCubic + ")\n",
                      "%s = mul(%x, %x)\n%l = mul(%s, " + kCubic + ")\n%q = mul(%l, %x)\n",
                      "%s = mul(%x, %x)\n%l = mul(%x, " + kCubic + ")\n%q = mul(%l, %s)\n",
                      "%l = mul(%x, " + kCubic + ")\n%s = mul(%l, %x)\n%q = mul(%s, %x)\n"};
// %q = 0.044715 x^2
const Lines kSquaresByPow = {"%p = pow(%x, 2)\n%q = mul(%p, " + kCubic + ")\n"};
const Lines kSquares = {"%s = mul(%x, %x)\n%q = mul(%s, " + kCubic + ")\n",
                        "%l = mul(%x, " + kCubic + ")\n%q = mul(%l, %x)\n"};

const Lines kTanh = {"%g = tanh(%u)\n%t = add(%g, 1)\n"};
const Lines kErf = each(
    {"%u = div(%x, 1.4142135623730951)\n", "%u = mul(%x, 0.7071067811865475)\n", "%u = mul(%x, 0.7071067811865476)\n"},
    {"%g = erf(%u)\n%t = add(%g, 1)\n"});

}  // namespace

// An activation that is spelled out in other operators: z is recomputed from x.
Pattern composed_activation() {
  Pattern p{.name = "composed-activation",
            .algebra = "z = silu, hardswish, mish, gelu or gelu_tanh of x, spelled out: x * sigmoid(x), ...",
            .keeps = "before: x and every intermediate result; after: x or what it is made from",
            .conditions =
                "constants of full precision; the intermediate results have no other user; nothing writes to x "
                "later: some spellings do not keep it",
            .for_regions = false,
            .rules = {}};
  const std::pair<const char*, Lines> formulas[] = {
      {"silu", {"%s = sigmoid(%x)\n%z = mul(%x, %s)"}},
      {"mish", {"%s = softplus(%x, 1, 20)\n%t = tanh(%s)\n%z = mul(%x, %t)"}},
      {"hardswish", each({"%a = add(%x, 3)\n%t = relu6(%a)\n"}, product(kSixth))},
      {"gelu", each(kErf, product(kHalf))},
      {"gelu_tanh", each(each(inner(kCubes, kSquares), kTanh), product(kHalf))},
      {"gelu_tanh_pow", each(each(inner(kCubesByPow, kSquaresByPow), kTanh), product(kHalf))},
  };
  for (const auto& [name, spellings] : formulas)
    for (const std::string& spelling : spellings)
      p.rules.push_back({.match = spelling,
                         .rewrite = "%z = tsmem::composed_act(%x, \"" + std::string(name) + "\")",
                         .intact = {"x"}});
  return p;
}

}  // namespace tsmem
