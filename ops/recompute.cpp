#include "recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include <chrono>
#include <mutex>
#include <unordered_set>

#include "torch_version.h"

namespace tsmem {

using at::Tensor;
using torch::autograd::Node;

// A value that a recipe starts from: made by another recipe, or the tensor itself.
struct Source {
  RecipePtr recipe;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensor;  // none: undefined
  uint32_t version = 0;
};

struct Recipe {
  std::vector<Source> sources;
  Make make;
  Pieces pieces = Pieces::no;
  int depth = 1;            // cheap recipes in a row
  int expensive_depth = 0;  // expensive ones in a row
  bool expensive = false;   // made once in a pass of backward
  bool view = false;        // of the only source
  Rows rows = Rows::all;
  int64_t columns = 0;                // of the output's last dimension, with Rows::own
  c10::DimVector strides;             // the output's
  std::optional<c10::Stream> stream;  // of a device that has streams
  bool shared = false;                // made once for users that are near one another
  mutable std::mutex mutex;
  mutable std::vector<int64_t> users;  // of a shared one: the nodes that need it in backward, in forward's order
  mutable Tensor made;  // until an expensive one's own op has run its backward, or a shared one's last user nearby
};

bool hooks_active() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

bool when_pass_ends(std::function<void()> f) {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  struct Once {
    std::function<void()> f;
    ~Once() { run(); }
    void run() {
      if (const auto now = std::exchange(f, nullptr)) now();
    }
  };
  // A pass that fails calls no callbacks, and destroys them.
  const auto once = std::make_shared<Once>();
  torch::autograd::Engine::get_default_engine().queue_callback([once] { once->run(); });
  once->f = std::move(f);
  return true;
}

namespace {

// What is recomputed is made as kernels are called: without autograd and autocast.
struct Below {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView dispatch;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// A chain of residual blocks is recomputed from its first one: its cost grows with the square of its length.
constexpr int kLongestChain = 8;
// Expensive ones are made once each, but every user holds all that a chain starts from.
constexpr int kLongestExpensiveChain = 100;
constexpr size_t kSmall = 4096;  // bytes that are not worth a kernel call
// Nodes between two users of a shared value: within a block of layers or two. Held any longer, it would be there at the
// peak (a skip connection across a whole network).
constexpr int64_t kNear = 16;

// What is known of a node's first output while the node lives.
struct Known {
  WeakNodePtr node{NodePtr()};
  RecipePtr recipe;
  uint32_t version = 0;  // of the output when the recipe was offered
  bool kept = false;     // somebody keeps it for backward
  int value = -1;        // in the journal
};

// A source that is this many times smaller than an output is kept rather than recomputed, and held by the output.
constexpr size_t kMuchSmaller = 16;

// Sources that nobody else may keep, held by the output until its user has asked for them: as long as the output lives.
// Not copied to what shares its memory (detach). Stays with the output when it is empty: another thread may detach it.
struct Held : c10::BackendMeta {
  std::mutex mutex;  // forks of one graph may ask at once
  std::vector<Tensor> sources;
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override { return {}; }
};

void let_go(const Tensor& output) {
  auto* held = dynamic_cast<Held*>(output.unsafeGetTensorImpl()->get_backend_meta());
  if (!held) return;
  std::vector<Tensor> dropped;  // destroyed after the lock is given back: graphs may go with them
  std::lock_guard<std::mutex> lock(held->mutex);
  dropped.swap(held->sources);
}

class Table {
 public:
  // f(known) under the lock; makes the entry where it is missing.
  template <class F>
  void update(const NodePtr& node, F f) {
    std::vector<Known> dropped;  // destroyed after the lock is given back: tensors and graphs may go with them
    std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() > limit_) sweep(dropped);
    Known& known = entries_[node.get()];
    if (known.node.expired()) {
      dropped.push_back(std::exchange(known, Known()));
      known.node = WeakNodePtr(node);
    }
    f(known);
  }
  std::optional<Known> find(const Node* node) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = entries_.find(node);
    if (it == entries_.end() || it->second.node.expired()) return std::nullopt;
    return it->second;
  }

 private:
  void sweep(std::vector<Known>& dropped) {
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
  std::unordered_map<const Node*, Known> entries_;
  size_t limit_ = 1024;
};

Table& table() {
  static Table* table = new Table;  // never destroyed: nodes may die after static objects
  return *table;
}

// The tensor that t is a view of, or t.
Tensor owner(const Tensor& t) { return t.is_view() ? Tensor(t._base()) : t; }

std::optional<Known> known_of(const Tensor& t) {
  const auto& node = t.grad_fn();
  if (!node || t.output_nr() != 0) return std::nullopt;
  return table().find(node.get());
}

// The stream that work on t goes to now; none on the CPU.
std::optional<c10::Stream> stream_of(const Tensor& t) {
  if (!t.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
}

// An expanded tensor has no more than its storage.
size_t bytes_of(const Tensor& t) {
  const size_t elements = t.numel() * t.element_size();
  return t.has_storage() ? std::min(elements, t.storage().nbytes()) : elements;
}

// Kept without further cost: somebody keeps it for backward, or it's a parameter.
bool kept_anyway(const Tensor& t) {
  const Tensor whole = owner(t);
  if (whole.is_leaf()) return whole.requires_grad();
  const auto known = known_of(whole);
  return known && known->kept;
}

void mark_kept(const Tensor& t) {
  const Tensor whole = owner(t);
  if (const auto& node = whole.grad_fn(); node && whole.output_nr() == 0)
    table().update(node, [](Known& k) { k.kept = true; });
  let_go(whole);
}

// Recipes that share sources are a graph, not a tree: each is visited once.
using Visited = std::unordered_map<const Recipe*, size_t>;

// The leaves of a recipe in the order of place(); false where one has gone or was changed.
bool collect(const Recipe& recipe, std::vector<Tensor>& leaves, Visited& visited) {
  if (!visited.emplace(&recipe, 0).second) return true;
  for (const Source& s : recipe.sources) {
    if (s.recipe) continue;
    if (!s.tensor) {
      leaves.emplace_back();
    } else {
      auto impl = s.tensor->lock();
      if (!impl) return false;
      Tensor t(std::move(impl));
      if (t.is_inference() || t._version() != s.version) return false;
      leaves.push_back(std::move(t));
    }
  }
  for (const Source& s : recipe.sources)
    if (s.recipe && !collect(*s.recipe, leaves, visited)) return false;
  return true;
}

// Where each recipe's own leaves begin: those of its sources' recipes come after them. Returns where the next would.
size_t place(const Recipe& recipe, size_t next, Visited& first) {
  if (!first.emplace(&recipe, next).second) return next;
  for (const Source& s : recipe.sources) next += s.recipe == nullptr;
  for (const Source& s : recipe.sources)
    if (s.recipe) next = place(*s.recipe, next, first);
  return next;
}

// Whether a shared recipe has a user soon after `user` in backward. Under the recipe's lock.
bool needed_soon(const Recipe& recipe, int64_t user) {
  const auto after = std::lower_bound(recipe.users.begin(), recipe.users.end(), user);
  return after != recipe.users.begin() && user - *std::prev(after) <= kNear;
}

// own: whether nobody else has the memory of what was made. level: how far it is from what the user needs; pieces put
// together don't count. Only what is near is held: every second block of a chain that is made from one another. To hold
// them all would cost more memory than it saves time.
Tensor make_again(const RecipePtr& recipe, const Tensor* leaves, const Visited& first, int64_t user, int level = 0,
                  bool* own = nullptr) {
  std::unique_lock<std::mutex> lock(recipe->mutex, std::defer_lock);
  bool hold = false;
  if (recipe->expensive || recipe->shared) {
    lock.lock();  // never against the order of the graph: sources never wait for what is made from them
    if (own) *own = false;
    if (recipe->made.defined()) return recipe->made;
    hold = recipe->expensive || (level <= 1 && needed_soon(*recipe, user));
  }
  std::vector<Tensor> operands;
  std::vector<bool> spare;
  const Tensor* leaf = leaves + first.at(recipe.get());
  const int next = level + (recipe->pieces == Pieces::no && !recipe->view);
  for (const Source& s : recipe->sources) {
    bool ours = false;
    operands.push_back(s.recipe ? make_again(s.recipe, leaves, first, user, next, &ours) : *leaf++);
    spare.push_back(ours);
  }
  Tensor made = recipe->make(operands, spare);
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

// Every user of what the current node has made in forward has run its backward.
void drop_own_output() {
  const auto node = torch::autograd::get_current_node();
  const auto known = node ? table().find(node.get()) : std::nullopt;
  if (!known || !known->recipe || !known->recipe->expensive) return;
  std::lock_guard<std::mutex> guard(known->recipe->mutex);
  known->recipe->made = Tensor();
}

// The recipe of t, where it has one that holds and is worth it.
RecipePtr usable_recipe(const Tensor& t, std::vector<Tensor>& leaves) {
  const Tensor whole = owner(t);
  const auto known = known_of(whole);
  if (!known || !known->recipe || known->recipe->depth > kLongestChain ||
      known->recipe->expensive_depth > kLongestExpensiveChain || whole._version() != known->version)
    return nullptr;
  // Backward runs each node on its forward's stream. What another stream made is kept itself, as by PyTorch's ops, whose
  // users order the streams and tell the allocator.
  if (known->recipe->stream != stream_of(whole)) return nullptr;
  Visited visited;
  if (!collect(*known->recipe, leaves, visited)) return nullptr;
  size_t cost = 0;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const Tensor& l : leaves)
    if (l.defined() && seen.insert(l.unsafeGetTensorImpl()).second && !kept_anyway(l)) cost += bytes_of(l);
  const size_t gain = bytes_of(whole);
  const bool worth = known->recipe->pieces == Pieces::yes ? cost <= gain : cost + gain / 4 <= gain;
  if (!worth) return nullptr;
  if (whole.is_same(t)) return known->recipe;
  auto view = std::make_shared<Recipe>();
  view->sources.push_back({known->recipe, std::nullopt});
  view->depth = known->recipe->depth;
  view->expensive_depth = known->recipe->expensive_depth;
  view->view = true;
  view->strides = c10::DimVector(t.strides());
  view->stream = known->recipe->stream;
  view->make = [sizes = t.sizes().vec(), strides = t.strides().vec(), offset = t.storage_offset(),
                whole_offset = whole.storage_offset()](std::vector<Tensor>& operands, const std::vector<bool>&) {
    return operands[0].as_strided(sizes, strides, offset - whole_offset + operands[0].storage_offset());
  };
  return view;
}

// A tensor's counter of changes, and where it stood in forward.
struct Version {
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t before = 0;
};

struct Program : torch::CustomClassHolder {
  std::vector<RecipePtr> recipes;
  int64_t user = 0;                   // the node's place in this thread's forward
  std::shared_ptr<Journal*> journal;  // none: forward was not noted
  int at = 0;                         // in the journal
  std::vector<Version> versions;      // of the leaves
};

// Of the thread that runs forward: others may train meanwhile. Backward, on whatever thread, finds it by its nodes;
// they may outlive the journal, which is null then.
thread_local std::shared_ptr<Journal*> journal;

// What is to be noted in now, or nullptr.
Journal* noting() { return journal && !(*journal)->closed ? *journal : nullptr; }

// Notes a value that an op could offer; returns its index.
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

}  // namespace

JournalGuard::JournalGuard(Journal& j) : outer_(std::exchange(journal, std::make_shared<Journal*>(&j))) {}

JournalGuard::~JournalGuard() {
  *journal = nullptr;
  journal = std::move(outer_);
}

void offer(const Tensor& output, const std::vector<Tensor>& operands, Make make, RecomputeArgument recompute,
           Pieces pieces, double flops, Rows rows) {
  const auto& node = output.grad_fn();
  if (!recompute.offered() || !node || output.output_nr() != 0 || bytes_of(output) < kSmall || hooks_active()) return;
  if (Journal* now = noting()) {
    const int value = note(now, output, operands, make, recompute.site, flops);
    table().update(node, [&](Known& k) { k.value = value; });
  }
  if (!recompute.recomputes()) return;
  auto recipe = std::make_shared<Recipe>();
  recipe->make = std::move(make);
  recipe->pieces = pieces;
  recipe->expensive = flops > 0;
  recipe->shared = !recipe->expensive && recompute.how == Recompute::shared;
  recipe->stream = stream_of(output);
  recipe->strides = c10::DimVector(output.strides());
  // Sums over blocks of rows are rounded to the dtype after each.
  const bool wide = output.scalar_type() == at::kFloat || output.scalar_type() == at::kDouble;
  if (wide && output.dim() >= 2 && output.is_contiguous()) {
    recipe->rows = rows;
    recipe->columns = output.size(-1);
  }
  auto held = c10::make_intrusive<Held>();
  for (const Tensor& t : operands) {
    Source s;
    if (t.defined()) {
      if (t.is_inference()) return;
      std::vector<Tensor> leaves;
      const bool kept = kept_anyway(t), little = kMuchSmaller * bytes_of(t) <= bytes_of(output);
      if (!kept && !little) s.recipe = usable_recipe(t, leaves);
      if (s.recipe) {
        for (const Tensor& l : leaves)
          if (l.defined() && kMuchSmaller * bytes_of(l) <= bytes_of(output)) held->sources.push_back(l);
        if (!recipe->expensive) recipe->depth = std::max(recipe->depth, s.recipe->depth + 1);
        recipe->expensive_depth = std::max(recipe->expensive_depth, s.recipe->expensive_depth + recipe->expensive);
      } else {
        s.tensor.emplace(t.getIntrusivePtr());
        s.version = t._version();
        let_go(t);  // a weak pointer would keep its sources alive, and it won't be recomputed from them
        if ((pieces == Pieces::yes || little) && !kept) held->sources.push_back(t);
      }
    }
    recipe->sources.push_back(std::move(s));
  }
  table().update(node, [&](Known& k) {
    k.recipe = std::move(recipe);
    k.version = output._version();
  });
  if (!held->sources.empty()) output.unsafeGetTensorImpl()->set_backend_meta(std::move(held));
}

bool costs_nothing(const Tensor& t) {
  std::vector<Tensor> leaves;
  return !hooks_active() && (kept_anyway(t) || usable_recipe(t, leaves));
}

void keeps_itself(const Tensor& output) {
  if (output.grad_fn()) mark_kept(output);
}

bool may_overwrite_first(const std::vector<Tensor>& operands, const std::vector<bool>& spare) {
  return spare[0] && at::infer_size(operands[0].sizes(), operands[1].sizes()) == operands[0].sizes() &&
         operands[0].is_non_overlapping_and_dense();
}

Tensor multiply_again(std::vector<Tensor>& operands, const std::vector<bool>& spare) {
  return may_overwrite_first(operands, spare) ? operands[0].mul_(operands[1]) : at::mul(operands[0], operands[1]);
}

// Whether a graph has the leaf already, that of this forward as a rule.
static bool in_a_graph(const Tensor& leaf) {
  std::lock_guard<std::mutex> lock(torch::autograd::impl::get_autograd_meta(leaf)->mutex_);
  return torch::autograd::impl::try_get_grad_accumulator(leaf) != nullptr;
}

Tensor cast_for_autocast(at::ScalarType to, const Tensor& t, at::DeviceType device) {
  // Autocast's cache would hold the casts of all parameters until forward ends, which pays for those alone that are
  // used again: then a graph has them already. Without a graph nothing tells, and it is as PyTorch's.
  const bool recorded = at::GradMode::is_enabled() && t.defined() && t.requires_grad();
  const bool once = recorded && t.is_leaf() && at::autocast::is_eligible(t, device) && !in_a_graph(t);
  Tensor cast = once ? t.to(to) : at::autocast::cached_cast(to, t, device);
  // The cache may have it from where nothing was recorded.
  if (recorded && !cast.requires_grad()) cast = t.to(to);
  if (!cast.is_same(t) && t.is_leaf())
    offer(cast, {t}, [to](std::vector<Tensor>& from, const std::vector<bool>&) { return from[0].to(to); });
  return cast;
}

void Keeper::add(const Tensor& t, bool always_itself) {
  if (Journal* now = t.defined() ? noting() : nullptr)
    if (const auto known = known_of(owner(t)); known && known->value >= 0)
      now->uses.push_back({known->value, static_cast<int>(now->values.size())});
  if (t.defined() && !always_itself && !hooks_active()) {
    std::vector<Tensor> leaves;
    if (RecipePtr recipe = kept_anyway(t) ? nullptr : usable_recipe(t, leaves)) {
      for (Tensor& l : leaves) {
        if (l.defined()) mark_kept(l);
        leaves_.push_back(std::move(l));
      }
      recipes_.push_back(std::move(recipe));
      return;
    }
    mark_kept(t);
  }
  leaves_.push_back(t);
  recipes_.push_back(nullptr);
}

void Keeper::save(torch::autograd::AutogradContext* ctx) {
  auto program = c10::make_intrusive<Program>();
  program->recipes = std::move(recipes_);
  static thread_local int64_t users = 0;
  program->user = ++users;
  Visited visited;
  for (const RecipePtr& r : program->recipes)
    if (r) place(*r, 0, visited);
  for (const auto& [recipe, leaf] : visited) {
    if (!recipe->shared) continue;
    std::lock_guard<std::mutex> lock(recipe->mutex);
    auto& all = recipe->users;  // nearly always in order: forks of one graph count apart
    all.insert(std::upper_bound(all.begin(), all.end(), program->user), program->user);
  }
  if (const Journal* now = noting()) {
    program->journal = journal;
    program->at = static_cast<int>(now->values.size());
  }
  for (const Tensor& l : leaves_)
    program->versions.push_back(l.defined() && !l.is_inference() ? Version{l.unsafeGetTensorImpl()->version_counter(),
                                                                           static_cast<uint32_t>(l._version())}
                                                                 : Version());
  ctx->saved_data["kept"] = at::IValue::make_capsule(std::move(program));
  ctx->save_for_backward(std::move(leaves_));
}

namespace {

// The saved tensors of a node. Where all those that were changed in place are sources of what is recomputed, PyTorch may
// have kept copies of none of them: its error, and ours.
std::vector<Tensor> unpack(torch::autograd::AutogradContext* ctx, const Program& program) {
  try {
    return ctx->get_saved_variables();
  } catch (const c10::Error& error) {
    size_t leaf = 0;
    bool itself = false, source = false;
    const auto changed = [&] {
      const Version& v = program.versions[leaf++];
      return v.counter.enabled() && v.counter.current_version() != v.before;
    };
    for (const RecipePtr& r : program.recipes) {
      Visited visited;
      const size_t end = r ? place(*r, leaf, visited) : leaf + 1;
      while (leaf < end) (r ? source : itself) |= changed();
    }
    if (itself || !source) throw;
    TORCH_CHECK(
        false, error.what_without_backtrace(),
        "\ntsmem: a source of a recomputed tensor was changed in place: backward recomputes a tensor from one "
        "that was written to after forward. Write to a copy of it (clone), or rewrite the model at level 'ops'; "
        "see docs/troubleshooting.md");
  }
}

}  // namespace

Kept::Kept(torch::autograd::AutogradContext* ctx) {
  const auto program = c10::static_intrusive_pointer_cast<Program>(ctx->saved_data["kept"].toCapsule());
  leaves_ = unpack(ctx, *program);
  recipes_ = program->recipes;
  user_ = program->user;
  size_t at = 0;
  for (const RecipePtr& r : recipes_) {
    first_.push_back(at);
    places_.emplace_back();
    at = r ? place(*r, at, places_.back()) : at + 1;
  }
  if (Journal* noted = program->journal ? *program->journal : nullptr; noted && noted->mark)
    noted->mark(program->at, true);
  drop_own_output();
}

Kept::~Kept() {
  for (const Visited& visited : places_)
    for (const auto& [recipe, leaf] : visited) {
      if (!recipe->shared) continue;
      Tensor dropped;  // freed without the lock
      std::lock_guard<std::mutex> lock(recipe->mutex);
      if (recipe->made.defined() && !needed_soon(*recipe, user_)) dropped = std::move(recipe->made);
    }
}

Tensor Kept::operator[](size_t slot) const {
  if (!recipes_[slot]) return leaves_[first_[slot]];
  const Below below;
  return make_again(recipes_[slot], leaves_.data(), places_[slot], user_);
}

namespace {

// Blocks that a core's own cache holds, of enough rows that a matrix product over them is not slower than one over all.
constexpr int64_t kBlockBytes = 2 << 20, kBlockRows = 1024;
// Elsewhere blocks that keep a whole device busy.
constexpr int64_t kDeviceBlockBytes = 64 << 20, kDeviceBlockRows = 1 << 15;

using MakeRows = std::function<Tensor(int64_t begin, int64_t end)>;

bool held(const Recipe& recipe) {
  std::lock_guard<std::mutex> lock(recipe.mutex);
  return recipe.made.defined();
}

// What makes some rows of a recipe's output; other sources are made here, as a whole. Notes the number of rows.
MakeRows rows_of(const RecipePtr& recipe, const Tensor* leaves, const Visited& first, int64_t user, int64_t* rows) {
  std::vector<MakeRows> sources;
  std::vector<bool> spare;
  const Tensor* leaf = leaves + first.at(recipe.get());
  for (const Source& s : recipe->sources) {
    const bool nested =
        s.recipe && s.recipe->rows == Rows::own && !s.recipe->expensive && !s.recipe->view && !held(*s.recipe);
    spare.push_back(nested);
    if (nested) {
      sources.push_back(rows_of(s.recipe, leaves, first, user, rows));
      continue;
    }
    const Tensor whole = s.recipe ? make_again(s.recipe, leaves, first, user, 1) : *leaf++;
    if (!whole.defined() || whole.dim() < 2 || whole.size(-1) != recipe->columns) {
      sources.push_back([whole](int64_t, int64_t) { return whole; });
      continue;
    }
    const Tensor matrix = whole.reshape({-1, recipe->columns});
    *rows = std::max(*rows, matrix.size(0));
    sources.push_back([whole, matrix, rows](int64_t begin, int64_t end) {
      return matrix.size(0) == *rows ? matrix.narrow(0, begin, end - begin) : whole;
    });
  }
  return [=](int64_t begin, int64_t end) {
    std::vector<Tensor> operands;
    for (const MakeRows& make : sources) operands.push_back(make(begin, end));
    return recipe->make(operands, spare);
  };
}

}  // namespace

void Kept::by_rows(size_t slot, const std::function<void(int64_t, const Tensor&)>& f) const {
  const RecipePtr& recipe = recipes_[slot];
  if (!recipe || recipe->rows != Rows::own || recipe->columns == 0 || held(*recipe)) {
    const Tensor whole = (*this)[slot];
    return f(0, whole.reshape({-1, whole.size(-1)}));
  }
  const Below below;
  int64_t rows = 0;
  const MakeRows make = rows_of(recipe, leaves_.data(), places_[slot], user_, &rows);
  const bool cpu = leaves_[first_[slot]].is_cpu();
  const int64_t bytes = recipe->columns * 4;
  const int64_t block =
      cpu ? std::max(kBlockRows, kBlockBytes / bytes) : std::max(kDeviceBlockRows, kDeviceBlockBytes / bytes);
  for (int64_t begin = 0; begin < rows;) {
    // The last block takes what would be too few rows for one.
    const int64_t end = rows - begin < 2 * block ? rows : begin + block;
    f(begin, make(begin, end).reshape({-1, recipe->columns}));
    begin = end;
  }
}

bool Kept::made(size_t slot) const { return recipes_[slot] != nullptr; }

std::vector<Tensor> Kept::refuse_double_backward(std::vector<Tensor> grads, const char* op, const Tensor& grad) const {
  std::vector<Tensor> sources = leaves_;
  sources.push_back(grad);
  return tsmem::refuse_double_backward(std::move(grads), op, sources);
}

bool Kept::any_made() const {
  return std::any_of(recipes_.begin(), recipes_.end(), [](const RecipePtr& r) { return r != nullptr; });
}

}  // namespace tsmem
