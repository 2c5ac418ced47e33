// What a node keeps for backward, and what it finds there (Keeper and SavedTensors).
#include <torch/csrc/autograd/engine.h>

#include "journal.h"
#include "known.h"
#include "recipe.h"

namespace tsmem {

using at::Tensor;

namespace {

// A tensor's counter of changes, and where it stood in forward.
struct Version {
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t before = 0;
};

struct Program : torch::CustomClassHolder {
  std::vector<RecipePtr> recipes;
  std::vector<GraphPlace> graph;
  int64_t user = 0;                   // the node's place in this thread's forward
  std::shared_ptr<Journal*> journal;  // none: forward was not noted
  int at = 0;                         // in the journal
  std::vector<Version> versions;      // of the leaves
};

}  // namespace

// Nowhere where no gradient flows through it.
static GraphPlace place_of(const Tensor& t) {
  if (!t.requires_grad()) return {};
  const auto edge = torch::autograd::impl::gradient_edge(t);
  return {WeakNodePtr(edge.function), edge.input_nr, true};
}

void Keeper::add_copy(const Tensor& copy, const Tensor& operand) {
  leaves_.push_back(copy);
  recipes_.push_back(nullptr);
  graph_.push_back(place_of(operand));
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
      graph_.push_back(place_of(t));
      return;
    }
    mark_kept(t);
  }
  leaves_.push_back(t);
  recipes_.push_back(nullptr);
  graph_.emplace_back();
}

Tensor Keeper::add_result(const Tensor& result) {
  add(result, /*always_itself=*/true);
  // The same memory and counter of changes; no place in the graph, in which the node would hold itself.
  if (result.defined() && !hooks_active()) result_ = result.tensor_data();
  return result_;
}

// Under the recipe's lock. Nearly always in order: forks of one graph count apart.
static void add_user(const Recipe& recipe, int64_t user) {
  recipe.users.insert(std::upper_bound(recipe.users.begin(), recipe.users.end(), user), user);
}

int64_t Keeper::save(torch::autograd::AutogradContext* ctx, bool soon) {
  auto program = c10::make_intrusive<Program>();
  program->recipes = std::move(recipes_);
  program->graph = std::move(graph_);
  static thread_local int64_t users = 0;
  program->user = ++users;
  Visited visited;
  for (const RecipePtr& r : program->recipes)
    if (r) place(*r, 0, visited);
  for (const auto& [recipe, leaf] : visited) {
    if (!recipe->shared || !soon) continue;
    std::lock_guard<std::mutex> lock(recipe->mutex);
    add_user(*recipe, program->user);
  }
  if (result_.defined()) leaves_.push_back(std::move(result_));
  if (const Journal* now = noting()) {
    program->journal = current_journal();
    program->at = static_cast<int>(now->values.size());
  }
  for (const Tensor& l : leaves_)
    program->versions.push_back(l.defined() && !l.is_inference() ? Version{l.unsafeGetTensorImpl()->version_counter(),
                                                                           static_cast<uint32_t>(l._version())}
                                                                 : Version());
  const int64_t user = program->user;
  ctx->saved_data["kept"] = at::IValue::make_capsule(std::move(program));
  ctx->save_for_backward(std::move(leaves_));
  return user;
}

void takes_own_output(const Tensor& output, int64_t user) {
  const auto known = known_of(output);
  if (!known || !known->recipe || !known->recipe->shared) return;
  std::lock_guard<std::mutex> lock(known->recipe->mutex);
  add_user(*known->recipe, user);
}

Tensor own_output_made() {
  const auto node = torch::autograd::get_current_node();
  const auto known = node ? known_of(node.get()) : std::nullopt;
  if (!known || !known->recipe) return {};
  std::lock_guard<std::mutex> lock(known->recipe->mutex);
  return known->recipe->made;
}

namespace {

// The saved tensors of a node. Where all those that were changed in place are sources of what is recomputed, PyTorch
// may have kept copies of none of them: its error, and ours.
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

// Every user of what the current node has made in forward has run its backward.
void drop_own_output() {
  const auto node = torch::autograd::get_current_node();
  const auto known = node ? known_of(node.get()) : std::nullopt;
  if (!known || !known->recipe) return;
  Tensor dropped;  // freed without the lock
  std::lock_guard<std::mutex> guard(known->recipe->mutex);
  std::swap(dropped, known->recipe->made);
}

}  // namespace

SavedTensors::SavedTensors(torch::autograd::AutogradContext* ctx) {
  const auto program = c10::static_intrusive_pointer_cast<Program>(ctx->saved_data["kept"].toCapsule());
  leaves_ = unpack(ctx, *program);
  recipes_ = program->recipes;
  graph_ = program->graph;
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

SavedTensors::~SavedTensors() {
  for (const Visited& visited : places_)
    for (const auto& [recipe, leaf] : visited) {
      if (!recipe->shared) continue;
      Tensor dropped;  // freed without the lock
      std::lock_guard<std::mutex> lock(recipe->mutex);
      if (recipe->made.defined() && !needed_soon(*recipe, user_)) dropped = std::move(recipe->made);
    }
}

Tensor SavedTensors::operator[](size_t slot) const {
  if (!recipes_[slot]) return in_graph(slot, leaves_[first_[slot]]);
  const auto make = [&] {
    const Below below;
    return make_again(recipes_[slot], leaves_.data(), places_[slot], user_);
  };
  return in_graph(slot, make());
}

Tensor SavedTensors::in_graph(size_t slot, const Tensor& value) const {
  const GraphPlace& place = graph_[slot];
  if (!at::GradMode::is_enabled() || !place.known || !value.defined()) return value;
  auto node = place.node.lock();
  TORCH_CHECK_NOT_IMPLEMENTED(node, "tsmem: second derivatives need a part of the graph that has gone");
  Tensor placed = value.detach();  // what was made may be held for others
  torch::autograd::impl::set_gradient_edge(placed, {std::move(node), place.output});
  return placed;
}

std::vector<Tensor> SavedTensors::operands_of(size_t slot, Form form) const {
  const RecipePtr& recipe = recipes_[slot];
  if (!recipe || recipe->form != form || at::GradMode::is_enabled()) return {};
  const Below below;
  return operands_again(*recipe, leaves_.data(), places_[slot], user_, 1);
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

void SavedTensors::by_rows(size_t slot, const std::function<void(int64_t, const Tensor&)>& f) const {
  const RecipePtr& recipe = recipes_[slot];
  if (!recipe || recipe->rows != Rows::own || recipe->columns == 0 || at::GradMode::is_enabled() || held(*recipe)) {
    const Tensor whole = (*this)[slot];
    return f(0, whole.reshape({-1, whole.size(-1)}));
  }
  const Below below;
  int64_t rows = 0;
  const MakeRows make = rows_of(recipe, leaves_.data(), places_[slot], user_, &rows);
  const bool cpu =
      std::none_of(leaves_.begin(), leaves_.end(), [](const Tensor& t) { return t.defined() && !t.is_cpu(); });
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

bool SavedTensors::made(size_t slot) const { return recipes_[slot] != nullptr; }

}  // namespace tsmem
