#include "rewriter/patterns/overlap.h"

#include <algorithm>
#include <map>
#include <optional>

#include "rewriter/patterns/pattern_lines.h"

namespace tsmem {
namespace {

// Lines as a graph, for matching one pattern in another.
struct Shape {
  std::vector<Line> lines;
  std::set<std::string> activations;  // of `act`; empty: any

  explicit Shape(const std::string& ir, std::set<std::string> activations = {})
      : lines(canonical_lines(ir)), activations(std::move(activations)) {}

  // The line and output that makes a value; none for an input.
  std::optional<std::pair<size_t, size_t>> maker(const std::string& argument) const {
    for (size_t i = 0; i < lines.size(); ++i)
      for (size_t k = 0; k < lines[i].outputs.size(); ++k)
        if (argument == "%" + lines[i].outputs[k]) return std::make_pair(i, k);
    return std::nullopt;
  }
  std::set<std::string> acts_of(const Line& line) const {
    if (line.act) return {line.act->act};
    return activations.count("in-place") ? std::set<std::string>() : activations;
  }
};

bool share(const std::set<std::string>& a, const std::set<std::string>& b) {
  return a.empty() || b.empty() || std::any_of(a.begin(), a.end(), [&](auto& x) { return b.count(x) > 0; });
}

using Bound = std::map<std::string, std::string>;  // values of the small shape

// Whether line i of `small` matches line j of `big`, with all that leads to it.
bool fits(const Shape& small, size_t i, const Shape& big, size_t j, Bound& bound) {
  const Line &x = small.lines[i], &y = big.lines[j];
  if (x.op != y.op || x.arguments.size() != y.arguments.size()) return false;
  if (x.op == "act" && !share(small.acts_of(x), big.acts_of(y))) return false;
  const auto argument_fits = [&](const std::string& a, const std::string& b, Bound& so_far) {
    if (!is_value(a)) return a == b;
    if (const auto seen = so_far.find(a); seen != so_far.end()) return seen->second == b;
    so_far[a] = b;
    const auto made = small.maker(a);
    if (!made) return true;
    const auto from = big.maker(b);
    return from && from->second == made->second && fits(small, made->first, big, from->first, so_far);
  };
  const auto in_order = [&](bool swapped) {
    Bound so_far = bound;
    for (size_t k = 0; k < x.arguments.size(); ++k)
      if (!argument_fits(x.arguments[k], y.arguments[swapped ? 1 - k : k], so_far)) return false;
    bound = std::move(so_far);
    return true;
  };
  return in_order(false) || (commutes(x.op) && in_order(true));
}

bool fits_somewhere(const Shape& small, const Shape& big) {
  for (size_t j = 0; j < big.lines.size(); ++j)
    if (Bound bound; fits(small, small.lines.size() - 1, big, j, bound)) return true;
  return false;
}

}  // namespace

bool overlap(const Rule& a, const Rule& b) {
  const Shape x(a.match, a.activations), y(b.match, b.activations);
  return fits_somewhere(x, y) || fits_somewhere(y, x);
}

bool matches_what_is_put(const Rule& rule, const Rule& by) {
  return fits_somewhere(Shape(rule.match, rule.activations), Shape(by.rewrite));
}

}  // namespace tsmem
