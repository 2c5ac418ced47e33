#include "journal.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <chrono>

#include "known.h"
#include "recipe.h"

namespace tsmem {

using at::Tensor;

// Of the thread that runs forward: others may train meanwhile.
static thread_local std::shared_ptr<Journal*> journal;

std::shared_ptr<Journal*> current_journal() { return journal; }

Journal* noting() { return journal && !(*journal)->closed ? *journal : nullptr; }

int note(Journal* journal, const Tensor& output, const std::vector<Tensor>& operands, const Make& make, int64_t site,
         double flops) {
  Journal::Value v{site,  static_cast<int64_t>(output.storage().nbytes()),
                   flops, 0,
                   {},    c10::weak_intrusive_ptr<c10::StorageImpl>(output.storage().getWeakStorageImpl())};
  for (const Tensor& t : operands)
    if (t.defined())
      if (const auto known = known_of(owner(t)); known && known->value >= 0) v.operands.push_back(known->value);
  if (journal->timed) {
    const Below below;
    std::vector<Tensor> detached;
    for (const Tensor& t : operands) detached.push_back(t.defined() ? t.detach() : t);
    const auto finish = [&] {
      if (output.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(output.device().index());
    };
    finish();
    for (int i = 0; i < 2; ++i) {
      const auto start = std::chrono::steady_clock::now();
      make(detached, std::vector<bool>(detached.size()));
      finish();
      const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      v.seconds = i == 0 ? seconds : std::min(v.seconds, seconds);
    }
  }
  journal->values.push_back(std::move(v));
  const int index = static_cast<int>(journal->values.size()) - 1;
  if (journal->mark) journal->mark(index, false);
  return index;
}

JournalGuard::JournalGuard(Journal& j) : outer_(std::exchange(journal, std::make_shared<Journal*>(&j))) {}

JournalGuard::~JournalGuard() {
  *journal = nullptr;
  journal = std::move(outer_);
}

}  // namespace tsmem
