#include "recipe.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_set>

#include "known.h"

namespace tsmem {

using at::Tensor;

// A chain of residual blocks is recomputed from its first one: its cost grows with the square of its length.
constexpr int kLongestChain = 8;
// Expensive ones are made once each, but every user holds all that a chain starts from.
constexpr int kLongestExpensiveChain = 100;
// A view of less than one in so many of a tensor's bytes is a source itself.
constexpr size_t kPart = 4;
// Nodes between two users of a shared value: within a block of layers or two. Held any longer, it would be there at the
// peak (a skip connection across a whole network).
constexpr int64_t kNear = 16;

std::optional<c10::Stream> stream_of(const Tensor& t) {
  const auto device = t.device();
  if (device.is_cpu() || device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type())) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

static const void* memory_of(const Tensor& t) { return t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr; }

// Whether its memory was given back or exchanged while the tensor stays, as that of the parameters of a module is that
// FSDP shards: it is there again for that module's own backward alone.
static bool has_other_memory(const Tensor& t, const Source& noted) {
  return memory_of(t) != noted.memory || (t.has_storage() && t.numel() > 0 && t.storage().nbytes() == 0);
}

// The leaves of a recipe in the order of place(), and of these those that are kept in any case; false where one has
// gone or was changed.
static bool collect(const Recipe& recipe, std::vector<Tensor>& leaves, std::unordered_set<const c10::TensorImpl*>& kept,
                    Visited& visited) {
  if (!visited.emplace(&recipe, 0).second) return true;
  for (const Source& s : recipe.sources) {
    if (s.recipe) continue;
    if (!s.tensor) {
      leaves.emplace_back();
    } else {
      auto impl = s.tensor->lock();
      if (!impl) return false;
      Tensor t(std::move(impl));
      if (t.is_inference() || t._version() != s.version || has_other_memory(t, s)) return false;
      if (s.kept) kept.insert(t.unsafeGetTensorImpl());
      leaves.push_back(std::move(t));
    }
  }
  for (const Source& s : recipe.sources)
    if (s.recipe && !collect(*s.recipe, leaves, kept, visited)) return false;
  return true;
}

size_t place(const Recipe& recipe, size_t next, Visited& first) {
  if (!first.emplace(&recipe, next).second) return next;
  for (const Source& s : recipe.sources) next += s.recipe == nullptr;
  for (const Source& s : recipe.sources)
    if (s.recipe) next = place(*s.recipe, next, first);
  return next;
}

bool needed_soon(const Recipe& recipe, int64_t user, const Recipe* held) {
  for (auto after = std::lower_bound(recipe.users.begin(), recipe.users.end(), user); after != recipe.users.begin();) {
    const int64_t next = *--after;
    if (user - next > kNear) return false;
    if (!held || !std::binary_search(held->users.begin(), held->users.end(), next)) return true;
  }
  return false;
}

// A recipe's sources, and (spare, unless null) which of them are nobody else's; from number `begin` on.
static std::vector<Tensor> sources_again(const Recipe& recipe, const Tensor* leaves, const Visited& first, int64_t user,
                                         int level, std::vector<bool>* spare, size_t begin = 0,
                                         const Recipe* held = nullptr) {
  std::vector<Tensor> sources;
  const Tensor* leaf = leaves + first.at(&recipe);
  for (size_t i = 0; i < recipe.sources.size(); ++i) {
    const RecipePtr& from = recipe.sources[i].recipe;
    const Tensor* own = from ? nullptr : leaf++;
    if (i < begin) continue;
    bool ours = false;
    sources.push_back(from ? make_again(from, leaves, first, user, level, &ours, held) : *own);
    if (spare) spare->push_back(ours);
  }
  return sources;
}

std::vector<Tensor> operands_again(const Recipe& recipe, const Tensor* leaves, const Visited& first, int64_t user,
                                   int level) {
  {
    std::lock_guard<std::mutex> lock(recipe.mutex);
    if (recipe.made.defined()) return {};
  }
  return sources_again(recipe, leaves, first, user, level, nullptr);
}

// The recipe's output, without its first source; undefined where no kernel does.
static Tensor make_without_norm(const Recipe& recipe, const Tensor* leaves, const Visited& first, int64_t user,
                                int level) {
  const RecipePtr norm = recipe.without_norm ? recipe.sources[0].recipe : nullptr;
  if (!norm || norm->form != Form::norm_relu) return {};
  return recipe.without_norm([&] {
    std::vector<Tensor> operands = operands_again(*norm, leaves, first, user, level + 1);
    if (!operands.empty())
      for (Tensor& t : sources_again(recipe, leaves, first, user, level, nullptr, 1)) operands.push_back(std::move(t));
    return operands;
  });
}

Tensor make_again(const RecipePtr& recipe, const Tensor* leaves, const Visited& first, int64_t user, int level,
                  bool* own, const Recipe* held) {
  std::unique_lock<std::mutex> lock(recipe->mutex, std::defer_lock);
  bool hold = false;
  if (recipe->expensive || recipe->shared) {
    lock.lock();  // never against the order of the graph: sources never wait for what is made from them
    if (own) *own = false;
    if (recipe->made.defined()) return recipe->made;
    hold = recipe->expensive || ((level <= 1 || recipe->layer) && needed_soon(*recipe, user, held));
  }
  const int next = level + (recipe->pieces == Pieces::no && !recipe->view);
  Tensor made = make_without_norm(*recipe, leaves, first, user, next);
  std::vector<bool> spare;
  if (!made.defined()) {
    std::vector<Tensor> operands =
        sources_again(*recipe, leaves, first, user, next, &spare, 0, hold ? recipe.get() : held);
    made = recipe->make(operands, spare);
  }
  // Another order of operands, or one that was overwritten, may give others.
  if (made.strides() != at::IntArrayRef(recipe->strides)) made = in_strides(at::alias(made), recipe->strides);
  if (own) *own = !hold && (!recipe->view || spare[0]);
  // Where the op's own backward, or the next user's, is not part of this pass, or the pass fails.
  if (hold && when_pass_ends([weak = std::weak_ptr<const Recipe>(recipe)] {
        if (const auto r = weak.lock()) {
          Tensor dropped;  // freed without the lock
          std::lock_guard<std::mutex> guard(r->mutex);
          std::swap(dropped, r->made);
        }
      }))
    recipe->made = made;
  return made;
}

// Whether as_strided gives t from `whole`: both are the same memory, and t not another type, negated or conjugated.
static bool strided_view(const Tensor& t, const Tensor& whole) {
  const auto plain_memory = [](const Tensor& x) {
    return x.layout() == at::kStrided && !x.is_nested() && x.has_storage() &&
           !x.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  };
  return plain_memory(t) && plain_memory(whole) && t.is_alias_of(whole) && t.scalar_type() == whole.scalar_type() &&
         t.is_neg() == whole.is_neg() && t.is_conj() == whole.is_conj();
}

// t, from `whole`, of which it is a view.
static RecipePtr view_of(Source whole_source, const Tensor& t, const Tensor& whole) {
  auto view = std::make_shared<Recipe>();
  const RecipePtr& from = whole_source.recipe;
  view->depth = from ? from->depth : 0;
  view->expensive_depth = from ? from->expensive_depth : 0;
  view->layers = from ? from->layers : 0;
  view->stream = from ? from->stream : stream_of(whole);
  view->view = true;
  view->strides = c10::DimVector(t.strides());
  view->make = [sizes = t.sizes().vec(), strides = t.strides().vec(), offset = t.storage_offset(),
                whole_offset = whole.storage_offset()](std::vector<Tensor>& operands, const std::vector<bool>&) {
    return operands[0].as_strided(sizes, strides, offset - whole_offset + operands[0].storage_offset());
  };
  view->sources.push_back(std::move(whole_source));
  return view;
}

Source source_of(const Tensor& t, bool keeps) {
  const Tensor whole = owner(t);
  const auto known = known_of(whole);
  Tensor from = known && known->result ? Tensor(known->result->lock()) : Tensor();
  const bool is_result = from.defined() && strided_view(t, from);
  // A leaf's memory may be exchanged while its parts stay: FSDP gives its parameter the shard's. And of a small part
  // the whole might be kept, by who counts as its keeper and has gone, for little.
  const bool takes_whole = !is_result && t.is_view() && !whole.is_leaf() && kPart * bytes_of(t) >= bytes_of(whole);
  if (!is_result) from = takes_whole && strided_view(t, whole) ? whole : t;
  Source source;
  source.tensor.emplace(from.getIntrusivePtr());
  source.version = t._version();
  source.memory = memory_of(from);
  source.kept = keeps || is_result;
  const bool is_t = from.is_same(t) || (from.sizes() == t.sizes() && from.strides() == t.strides() &&
                                        from.storage_offset() == t.storage_offset());
  return is_t ? source : Source{view_of(std::move(source), t, from), std::nullopt};
}

RecipePtr usable_recipe(const Tensor& t, std::vector<Tensor>& leaves) {
  const Tensor whole = owner(t);
  const auto known = known_of(whole);
  if (!known || !known->recipe || known->recipe->depth > kLongestChain ||
      known->recipe->expensive_depth > kLongestExpensiveChain || whole._version() != known->version)
    return nullptr;
  // Backward runs each node on its forward's stream. What another stream made is kept itself, as by PyTorch's ops,
  // whose users order the streams and tell the allocator.
  if (known->recipe->stream != stream_of(whole)) return nullptr;
  Visited visited;
  std::unordered_set<const c10::TensorImpl*> counted;
  if (!collect(*known->recipe, leaves, counted, visited)) return nullptr;
  size_t cost = 0;
  for (const Tensor& l : leaves)
    if (l.defined() && counted.insert(l.unsafeGetTensorImpl()).second && !kept_anyway(l)) cost += bytes_of(l);
  const size_t gain = bytes_of(whole);
  const bool worth = known->recipe->pieces == Pieces::yes ? cost <= gain : cost + gain / 4 <= gain;
  if (!worth) return nullptr;
  if (whole.is_same(t)) return known->recipe;
  if (!strided_view(t, whole)) return nullptr;
  return view_of(Source{known->recipe, std::nullopt}, t, whole);
}

}  // namespace tsmem
