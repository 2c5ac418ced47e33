#include "rewriter/plan/batches.h"

#include <algorithm>
#include <cmath>

#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"

namespace tsmem {

int64_t Batches::peak(int64_t size) const {
  double most = 0;
  for (size_t t = 0; t < fixed.size(); ++t) most = std::max(most, fixed[t] + each[t] * static_cast<double>(size));
  return static_cast<int64_t>(std::ceil(most));
}

int64_t Batches::largest(int64_t bytes) const {
  int64_t fits = 0, over = 1;
  while (over < (int64_t{1} << 40) && peak(over) <= bytes) over *= 2;
  while (over - fits > 1) {
    const int64_t middle = fits + (over - fits) / 2;
    (peak(middle) <= bytes ? fits : over) = middle;
  }
  return fits;
}

Batches batches_through(int64_t batch, const StepMemory& needed, int64_t other_batch, const StepMemory& other_needed) {
  Batches found;
  found.batch = batch;
  // Where the two steps have not the same slots, their peaks alone are compared.
  const bool same = needed.slots.size() == other_needed.slots.size();
  for (size_t t = 0; t < (same ? needed.slots.size() : 1); ++t) {
    const auto x = static_cast<double>(same ? needed.slots[t].peak : needed.peak);
    const auto y = static_cast<double>(same ? other_needed.slots[t].peak : other_needed.peak);
    found.each.push_back((y - x) / static_cast<double>(other_batch - batch));
    found.fixed.push_back(x - found.each.back() * static_cast<double>(batch));
  }
  return found;
}

int64_t batch_of(const std::vector<c10::IValue>& inputs) {
  const auto tensors = all_tensors(c10::ivalue::Tuple::create(inputs));
  if (tensors.empty() || tensors[0].dim() == 0 || tensors[0].size(0) == 0)
    throw Error(ErrorKind::input, "The input's first tensor has no batch, so there is no batch size to change.");
  return tensors[0].size(0);
}

std::vector<c10::IValue> with_batch(const std::vector<c10::IValue>& inputs, int64_t batch) {
  const int64_t given = batch_of(inputs);
  std::vector<c10::IValue> changed;
  for (const auto& v : inputs)
    changed.push_back(map_tensors(v, [&](const at::Tensor& t) {
      if (t.dim() == 0 || t.size(0) != given) return t;
      const std::vector<at::Tensor> copies(static_cast<size_t>((batch + given - 1) / given), t);
      return at::cat(copies).narrow(0, 0, batch).clone();
    }));
  return changed;
}

}  // namespace tsmem
