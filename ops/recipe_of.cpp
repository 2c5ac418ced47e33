// For operators whose autograd is not ours: what a tensor is made from, to keep in its place.
#include <ATen/MemoryOverlap.h>

#include "function.h"
#include "known.h"
#include "recipe.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// No result of the model's: a node that keeps what another one would.
struct RecipeOf : Function<RecipeOf> {
  static Tensor forward(AutogradContext* ctx, const Tensor& t) {
    Keeper keeper;
    keeper.add(t);
    keeper.save(ctx);
    return at::empty({0}, t.options());
  }

  static variable_list gradients(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "tsmem::_recipe_of gives nothing to differentiate");
  }
};

using Node = torch::autograd::CppNode<RecipeOf>;

OptTensor recipe_of(const Tensor& t) {
  if (!plain(t) || hooks_active() || kept_anyway(t)) return std::nullopt;
  std::vector<Tensor> leaves;
  if (!usable_recipe(t, leaves)) return std::nullopt;
  // Inside of an autograd.Function's forward gradients are switched off.
  const at::AutoGradMode grad(true);
  return RecipeOf::apply(t);
}

// once: the recipe's holder asks for it once in a pass, and outlives the pass.
Tensor make_from(const Tensor& recipe, bool once) {
  auto* node = dynamic_cast<Node*>(recipe.grad_fn().get());
  TORCH_CHECK_VALUE(node, "tsmem::_make_from takes what tsmem::_recipe_of has returned");
  Tensor made = SavedTensors(&node->ctx_)[0];
  if (once && last_reader()) node->release_variables();
  if (made.use_count() == 1 && made.storage().use_count() == 1) return made;
  // Others' backward may write to what it has kept, and look at its strides.
  if (at::has_internal_overlap(made) == at::MemOverlap::Yes) return made;
  return at::empty_strided(made.sizes(), made.strides(), made.options()).copy_(made);
}

}  // namespace

void register_recipe_of(torch::Library& m) {
  m.def("_recipe_of(Tensor t) -> Tensor?", TORCH_FN(recipe_of));
  m.def("_make_from(Tensor recipe, bool once=False) -> Tensor", TORCH_FN(make_from));
}

}  // namespace tsmem
