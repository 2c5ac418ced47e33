#include "rewriter/verify/smaller_inputs.h"

#include <ATen/ATen.h>

#include "rewriter/inputs.h"

#include <limits>

namespace tsmem {
namespace {

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

int64_t elements(const std::vector<c10::IValue>& inputs) {
  int64_t n = 0;
  for (const auto& v : inputs)
    for (const auto& t : all_tensors(v)) n += t.numel();
  return n;
}

// How many tensors, or dictionaries of these, a list holds; 0: it is none, or holds others.
int64_t examples(const c10::IValue& v) { return v.isList() && !all_tensors(v).empty() ? v.toListRef().size() : 0; }

}  // namespace

std::vector<c10::IValue> smaller_inputs(const std::vector<c10::IValue>& inputs, int64_t rows, int64_t side) {
  int64_t given = -1;
  int64_t listed = 0;
  for (const auto& v : inputs) {
    if (given < 0 && v.isTensor() && v.toTensor().dim() > 0) given = v.toTensor().size(0);
    if (!listed) listed = examples(v);
  }
  std::vector<c10::IValue> out;
  for (const auto& v : inputs) {
    if (listed > rows && examples(v) == listed) {
      const auto all = v.toList();
      c10::impl::GenericList first(all.elementType());
      for (int64_t i = 0; i < rows; ++i) first.push_back(all.get(i));
      out.emplace_back(std::move(first));
      continue;
    }
    if (!v.isTensor()) {
      out.push_back(v);
      continue;
    }
    auto t = v.toTensor();
    if (t.dim() > 0 && t.size(0) == given && given > rows) t = t.narrow(0, 0, rows);
    for (int64_t d = t.dim() - 2; side > 0 && t.dim() >= 4 && d < t.dim(); ++d)
      if (const int64_t small = side + t.size(d) % 32; small < t.size(d)) t = t.narrow(d, 0, small);
    out.emplace_back(t.is_same(v.toTensor()) ? t : t.detach().clone(v.toTensor().suggest_memory_format()));
  }
  return out;
}

std::vector<std::vector<c10::IValue>> smaller_inputs(const std::vector<c10::IValue>& inputs) {
  std::vector<std::vector<c10::IValue>> out;
  // The picture matters most: a fourth of its side is a sixteenth of the work.
  const std::pair<int64_t, int64_t> sizes[] = {{3, 64}, {3, 128}, {kAll, 64}, {3, 0}};
  for (const auto& [rows, side] : sizes) {
    auto small = smaller_inputs(inputs, rows, side);
    const bool same = elements(small) >= elements(inputs) || (!out.empty() && elements(small) == elements(out.back()));
    if (!same) out.push_back(std::move(small));
  }
  return out;
}

}  // namespace tsmem
