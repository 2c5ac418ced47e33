#include "recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "journal.h"
#include "known.h"
#include "offload.h"
#include "recipe.h"
#include "traits.h"

namespace tsmem {

using at::Tensor;

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

constexpr size_t kSmall = 4096;  // bytes that are not worth a kernel call

// A source that is this many times smaller than an output is kept rather than recomputed.
constexpr size_t kMuchSmaller = 16;
// One that is this many times smaller is held by the output, where nobody else may keep it (what is interpolated).
constexpr size_t kSmaller = 4;

// The first operands of a cheap layer (as_cheap_layer() and so on), which its own backward keeps where they are leaves.
constexpr size_t kFactors = 2;

// Offers what the host's memory gives back. Once it is there it is held until the op's own backward.
static void offer_back(const Tensor& output) {
  auto recipe = std::make_shared<Recipe>();
  recipe->make = offloaded(output);
  if (!recipe->make) return;
  recipe->expensive = true;
  recipe->stream = stream_of(output);
  recipe->strides = c10::DimVector(output.strides());
  update_known(output.grad_fn(), [&](OutputRecord& k) {
    k.recipe = std::move(recipe);
    k.version = output._version();
  });
}

void offer(const Tensor& output, const std::vector<Tensor>& operands, Make make, RecomputeArgument recompute,
           Pieces pieces, Cost cost, Rows rows, Form form, MakeWithoutNorm without_norm) {
  const auto& node = output.grad_fn();
  if (!recompute.offered() || !node || output.output_nr() != 0 || bytes_of(output) < kSmall || hooks_active()) return;
  if (Journal* now = noting()) {
    const int value = note(now, output, operands, make, recompute.site, cost.expensive ? cost.flops : 0);
    update_known(node, [&](OutputRecord& k) { k.value = value; });
  }
  if (recompute.how == Recompute::offload) return offer_back(output);
  if (!recompute.recomputes()) return;
  auto recipe = std::make_shared<Recipe>();
  recipe->make = std::move(make);
  recipe->pieces = pieces;
  recipe->form = form;
  recipe->without_norm = std::move(without_norm);
  recipe->expensive = cost.expensive;
  recipe->shared = !recipe->expensive && recompute.how != Recompute::each_time;
  recipe->layer = recompute.how == Recompute::if_cheap;
  if (recipe->layer) recipe->layers = cost.flops;
  recipe->stream = stream_of(output);
  recipe->strides = c10::DimVector(output.strides());
  // Sums over blocks of rows are rounded to the dtype after each.
  const bool wide = output.scalar_type() == at::kFloat || output.scalar_type() == at::kDouble;
  if (wide && output.dim() >= 2 && output.is_contiguous()) {
    recipe->rows = rows;
    recipe->columns = output.size(-1);
  }
  std::vector<Tensor> held;
  for (const Tensor& t : operands) {
    Source s;
    if (t.defined()) {
      if (t.is_inference()) return;
      std::vector<Tensor> leaves;
      const bool keeps = recipe->layer && recipe->sources.size() < kFactors && t.is_leaf();
      // Many little pieces are as much as what they make.
      const size_t alike = pieces == Pieces::yes ? operands.size() : 1;
      const bool kept = keeps || kept_anyway(t), little = kMuchSmaller * alike * bytes_of(t) <= bytes_of(output);
      if (!kept && !little) s.recipe = usable_recipe(t, leaves);
      if (s.recipe) {
        for (const Tensor& l : leaves)
          if (l.defined() && kSmaller * bytes_of(l) <= bytes_of(output)) held.push_back(l);
        if (!recipe->expensive) recipe->depth = std::max(recipe->depth, s.recipe->depth + 1);
        recipe->layers += s.recipe->layers;
        recipe->expensive_depth = std::max(recipe->expensive_depth, s.recipe->expensive_depth + recipe->expensive);
      } else {
        s = source_of(t, keeps);
        let_go(owner(t));  // a weak pointer would keep its sources, from which it won't be recomputed
        if (!kept && (pieces == Pieces::yes || kSmaller * bytes_of(t) <= bytes_of(output))) held.push_back(t);
      }
    }
    recipe->sources.push_back(std::move(s));
  }
  update_known(node, [&](OutputRecord& k) {
    k.recipe = std::move(recipe);
    k.version = output._version();
  });
  hold(output, std::move(held));
}

double layers_of(const Tensor& t) {
  if (!t.defined()) return 0;
  std::vector<Tensor> leaves;
  const RecipePtr recipe = kept_anyway(t) ? nullptr : usable_recipe(t, leaves);
  return recipe ? recipe->layers : 0;
}

LayerOffer as_cheap_layer(RecomputeArgument recompute, const Tensor& output, const Tensor& input, const Tensor& weight,
                          const Tensor& other, double flops, bool depthwise) {
  if (recompute.how != Recompute::if_cheap) return {recompute, {flops, true}};
  const double operations = as_in_a_product(flops, depthwise);
  const bool cheap = is_cheap_layer(operations / static_cast<double>(output.numel())) &&
                     (weight.requires_grad() || costs_nothing(input)) &&
                     (input.is_leaf() || output.numel() >= input.numel()) &&
                     is_cheap_after(layers_of(input) + layers_of(weight) + layers_of(other), operations);
  return {cheap ? Recompute::if_cheap : Recompute::off, {operations}};
}

LayerOffer as_cheap_product(RecomputeArgument recompute, const Tensor& output, const Tensor& a, const Tensor& b,
                            const Tensor& other, double flops) {
  if (recompute.how != Recompute::if_cheap) return {recompute, {flops, true}};
  const bool cheap = is_cheap_layer(flops / static_cast<double>(output.numel())) && a.requires_grad() &&
                     b.requires_grad() && is_cheap_after(layers_of(a) + layers_of(b) + layers_of(other), flops);
  return {cheap ? Recompute::if_cheap : Recompute::off, {flops}};
}

RecomputeArgument as_cheap_attention(RecomputeArgument recompute, const Tensor& query, const Tensor& key,
                                     const Tensor& value, bool causal) {
  if (recompute.how != Recompute::if_cheap) return recompute;
  const int64_t heads = query.dim() < 4 ? 1 : query.size(-3);
  const bool cheap =
      is_cheap_attention(static_cast<double>(key.size(-2)), static_cast<double>(heads * value.size(-1)), causal) &&
      layers_of(query) + layers_of(key) + layers_of(value) == 0;
  return cheap ? Recompute::if_cheap : Recompute::off;
}

bool costs_nothing(const Tensor& t) {
  std::vector<Tensor> leaves;
  return !hooks_active() && (kept_anyway(t) || usable_recipe(t, leaves));
}

void keeps_itself(const Tensor& output, const Tensor& result) {
  if (!output.grad_fn()) return;
  mark_kept(output);
  if (result.defined())
    update_known(output.grad_fn(), [&](OutputRecord& k) { k.result.emplace(result.getIntrusivePtr()); });
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

// A wider cast is held as what it was made from, which is smaller.
static void offer_cast(const Tensor& cast, const Tensor& t) {
  const auto pieces = cast.element_size() > t.element_size() ? Pieces::yes : Pieces::no;
  offer(
      cast, {t},
      [to = cast.scalar_type()](std::vector<Tensor>& from, const std::vector<bool>&) { return from[0].to(to); },
      Recompute::shared, pieces);
}

Tensor as_scripted(const Tensor& t, RecomputeArgument recompute) {
  const Tensor cast = as_scripted(t);
  if (recompute.offered() && !cast.is_same(t)) offer_cast(cast, t);
  return cast;
}

OptTensor cast_for_autocast(at::ScalarType to, const OptTensor& t, at::DeviceType device, RecomputeArgument recompute) {
  return t && t->defined() ? OptTensor(cast_for_autocast(to, *t, device, recompute)) : t;
}

Tensor cast_for_autocast(at::ScalarType to, const Tensor& t, at::DeviceType device, RecomputeArgument recompute) {
  // Autocast's cache would hold the casts of all parameters until forward ends, which pays for those alone that are
  // used again: then a graph has them already. Without a graph nothing tells, and it is as PyTorch's.
  const bool recorded = at::GradMode::is_enabled() && t.defined() && t.requires_grad();
  const bool once = recorded && t.is_leaf() && at::autocast::is_eligible(t, device) && !in_a_graph(t);
  const uint64_t first = at::sequence_number::peek();
  Tensor cast = once ? t.to(to) : at::autocast::cached_cast(to, t, device);
  // The cache may have it from where nothing was recorded.
  if (recorded && !cast.requires_grad()) cast = t.to(to);
  // A cast that the cache has had may be of numbers that t no longer has: what was offered with it tells.
  const bool made_now = cast.grad_fn() && cast.grad_fn()->sequence_nr() >= first;
  if (!cast.is_same(t) && made_now && (t.is_leaf() || recompute.offered())) offer_cast(cast, t);
  return cast;
}

}  // namespace tsmem
