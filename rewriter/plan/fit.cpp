#include "rewriter/plan/fit.h"

#include <algorithm>
#include <fstream>
#include <set>

#include "rewriter/measure/inputs.h"
#include "rewriter/plan/size.h"

namespace tsmem {
namespace {

// Bytes that the machine has to give.
int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;)
    if (int64_t kib = 0; word == "MemAvailable:" && file >> kib) return kib * 1024;
  return 0;
}

struct ModelBytes {
  int64_t weights = 0, gradients = 0;
};

ModelBytes bytes_of(const torch::jit::Module& module) {
  ModelBytes bytes;
  std::set<const void*> seen;
  for (const auto& m : module.modules())
    for (const auto& v : m._ivalue()->slots())
      for (const auto& t : v.isObject() ? std::vector<at::Tensor>() : all_tensors(v))
        if (t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second) {
          bytes.weights += static_cast<int64_t>(t.storage().nbytes());
          if (t.requires_grad()) bytes.gradients += static_cast<int64_t>(t.nbytes());
        }
  return bytes;
}

}  // namespace

ChosenPlan::Batches batch_memory(Planner& planner, const PlanPoint& point, const torch::jit::Module& module,
                                 const std::vector<c10::IValue>& inputs, const PlanRequest& request) {
  ChosenPlan::Batches result;
  const ModelBytes model = bytes_of(module);
  result.weight_bytes = model.weights;
  result.gradient_and_optimizer_bytes = (1 + request.optimizer_states) * model.gradients;
  const int64_t always = result.weight_bytes + result.gradient_and_optimizer_bytes;
  int64_t input_bytes = 0;
  for (const auto& t : all_tensors(c10::ivalue::Tuple::create(inputs))) input_bytes += static_cast<int64_t>(t.nbytes());
  const int64_t given = planner.batch();
  const double input_each = static_cast<double>(input_bytes) / static_cast<double>(given);
  const auto memory = [&](int64_t batch, int64_t peak, bool measured) {
    const auto input = static_cast<int64_t>(input_each * static_cast<double>(batch));
    return BatchMemory{batch, peak, always + peak + input, measured};
  };
  auto line = planner.batches(point.choice, 2 * given);
  // A step with this batch is run where there is memory for it, and time: two steps of at most half a minute.
  const auto measurable = [&](int64_t batch) {
    const double seconds = point.predicted_seconds * static_cast<double>(batch) / static_cast<double>(given);
    return request.how.estimate || (line.peak(batch) < available_memory() / 10 * 7 && seconds < 30);
  };
  for (const int64_t b : request.batch_sizes) {
    const bool run = b != given && measurable(b);
    const int64_t peak = run ? planner.batches(point.choice, b).peak(b) : line.peak(b);
    result.asked.push_back(memory(b, peak, run || b == given));
  }
  if (request.fit.empty()) return result;
  const int64_t size = result.fit_bytes = parse_size(request.fit, "fit", 0);
  const auto total = [&](int64_t batch) { return memory(batch, line.peak(batch), false).total_bytes; };
  const auto largest = [&] {
    int64_t batch = line.largest(size - always);
    while (batch > 0 && total(batch) > size) batch -= std::max<int64_t>(1, batch / 1000);
    return batch;
  };
  // Between measured batches bytes grow in proportion, elsewhere roughly: so the answer is measured too.
  int64_t batch = largest();
  bool measured = batch == given || batch == 2 * given;
  for (int i = 0; i < 4 && batch > 0 && !measured && measurable(batch); ++i) {
    line = planner.batches(point.choice, batch);
    measured = total(batch) <= size;
    if (!measured) batch = std::min(largest(), batch - 1);
  }
  result.largest = batch > 0 ? memory(batch, line.peak(batch), measured) : BatchMemory{0, 0, 0, measured};
  return result;
}

}  // namespace tsmem
