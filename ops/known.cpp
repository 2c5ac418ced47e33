#include "known.h"

#include <mutex>

namespace tsmem {

using at::Tensor;
using torch::autograd::Node;

namespace {

// Sources that nobody else may keep, held by the output until its user has asked for them: as long as the output lives.
// Not copied to what shares its memory (detach). Stays with the output when it is empty: another thread may detach it.
struct HeldSources : c10::BackendMeta {
  std::mutex mutex;  // forks of one graph may ask at once
  std::vector<Tensor> sources;
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override { return {}; }
};

class Table {
 public:
  // f(known) under the lock; makes the entry where it is missing.
  void update(const NodePtr& node, const std::function<void(OutputRecord&)>& f) {
    std::vector<OutputRecord> dropped;  // destroyed after the lock is given back: tensors and graphs may go with them
    std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() > limit_) sweep(dropped);
    OutputRecord& known = entries_[node.get()];
    if (known.node.expired()) {
      dropped.push_back(std::exchange(known, OutputRecord()));
      known.node = WeakNodePtr(node);
    }
    f(known);
  }
  std::optional<OutputRecord> find(const Node* node) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = entries_.find(node);
    if (it == entries_.end() || it->second.node.expired()) return std::nullopt;
    return it->second;
  }

 private:
  void sweep(std::vector<OutputRecord>& dropped) {
    for (auto it = entries_.begin(); it != entries_.end();) {
      if (it->second.node.expired()) {
        dropped.push_back(std::move(it->second));
        it = entries_.erase(it);
      } else {
        ++it;
      }
    }
    limit_ = 2 * entries_.size() + 1024;
  }
  std::mutex mutex_;
  std::unordered_map<const Node*, OutputRecord> entries_;
  size_t limit_ = 1024;
};

Table& table() {
  static Table* table = new Table;  // never destroyed: nodes may die after static objects
  return *table;
}

}  // namespace

void update_known(const NodePtr& node, const std::function<void(OutputRecord&)>& f) { table().update(node, f); }

std::optional<OutputRecord> known_of(const Node* node) { return table().find(node); }

std::optional<OutputRecord> known_of(const Tensor& t) {
  const auto& node = t.grad_fn();
  if (!node || t.output_nr() != 0) return std::nullopt;
  return known_of(node.get());
}

Tensor owner(const Tensor& t) { return t.is_view() ? Tensor(t._base()) : t; }

size_t bytes_of(const Tensor& t) {
  const size_t elements = t.numel() * t.element_size();
  return t.has_storage() ? std::min(elements, t.storage().nbytes()) : elements;
}

// The bit of an output in OutputRecord::kept; 0: there is none.
static uint64_t bit_of(const Tensor& t) { return t.output_nr() < 64 ? uint64_t{1} << t.output_nr() : 0; }

bool kept_anyway(const Tensor& t) {
  const Tensor whole = owner(t);
  if (whole.is_leaf()) return whole.requires_grad();
  const auto known = known_of(whole.grad_fn().get());
  return known && (known->kept & bit_of(whole));
}

void mark_kept(const Tensor& t) {
  const Tensor whole = owner(t);
  void (*when_kept)(const Tensor&) = nullptr;
  if (const auto& node = whole.grad_fn(); node && bit_of(whole))
    update_known(node, [&](OutputRecord& k) {
      k.kept |= bit_of(whole);
      if (whole.output_nr() == 0) when_kept = std::exchange(k.when_kept, nullptr);
    });
  if (when_kept) when_kept(whole);
  let_go(whole);
}

// Whether the place for what a tensor's device keeps of it is free: HPU, and some devices of others, have metadata of
// their own there.
static bool has_room(const Tensor& t) {
  const auto* meta = t.unsafeGetTensorImpl()->get_backend_meta();
  return t.device().type() != at::kHPU && (!meta || dynamic_cast<const HeldSources*>(meta));
}

void hold(const Tensor& output, std::vector<Tensor> sources) {
  if (sources.empty() || !has_room(output)) return;
  auto held = c10::make_intrusive<HeldSources>();
  held->sources = std::move(sources);
  output.unsafeGetTensorImpl()->set_backend_meta(std::move(held));
}

void let_go(const Tensor& output) {
  auto* held = dynamic_cast<HeldSources*>(output.unsafeGetTensorImpl()->get_backend_meta());
  if (!held) return;
  std::vector<Tensor> dropped;  // destroyed after the lock is given back: graphs may go with them
  std::lock_guard<std::mutex> lock(held->mutex);
  dropped.swap(held->sources);
}

}  // namespace tsmem
