// How a tensor is recomputed: the recipes that recompute.h's offers become.
#pragma once
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "known.h"
#include "recompute.h"

namespace tsmem {

// A value that a recipe starts from: made by another recipe, or the tensor itself.
struct Source {
  RecipePtr recipe;
  std::optional<WeakTensor> tensor;  // none: undefined
  uint32_t version = 0;
  const void* memory = nullptr;  // the storage that it had, or none
  bool kept = false;             // the op that made it, or the one that the recipe is of, keeps it for its own backward
};

struct Recipe {
  std::vector<Source> sources;
  Make make;
  Pieces pieces = Pieces::no;
  int depth = 1;            // cheap recipes in a row
  int expensive_depth = 0;  // expensive ones in a row
  bool expensive = false;   // made once in a pass of backward
  bool view = false;        // of the only source
  bool layer = false;       // a cheap layer's (Recompute::if_cheap)
  double layers = 0;        // the operations of the cheap layers that it is made by, itself included
  Rows rows = Rows::all;
  Form form = Form::any;
  MakeWithoutNorm without_norm;       // or none
  int64_t columns = 0;                // of the output's last dimension, with Rows::own
  c10::DimVector strides;             // the output's
  std::optional<c10::Stream> stream;  // of a device that has streams
  bool shared = false;                // made once for users that are near one another
  mutable std::mutex mutex;
  mutable std::vector<int64_t> users;  // of a shared one: the nodes that need it in backward, in forward's order
  mutable at::Tensor made;  // until an expensive one's own op has run its backward, or a shared one's last user nearby
};

// What is recomputed is made as kernels are called: without autograd and autocast.
struct Below {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView dispatch;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Recipes that share sources are a graph, not a tree: each is visited once.
using Visited = std::unordered_map<const Recipe*, size_t>;

// Where each recipe's own leaves begin: those of its sources' recipes come after them. Returns where the next would.
size_t place(const Recipe& recipe, size_t next, Visited& first);

// The stream that work on t goes to now; none on the CPU.
std::optional<c10::Stream> stream_of(const at::Tensor& t);

// Whether a shared recipe has a user soon after `user` in backward, other than those of `held`, which is held for them
// and made from it. Under the locks of both.
bool needed_soon(const Recipe& recipe, int64_t user, const Recipe* held = nullptr);

// own: whether nobody else has the memory of what was made. level: how far it is from what the user needs; pieces put
// together don't count. Only what is near is held: every second block of a chain that is made from one another. To hold
// them all would cost more memory than it saves time. held: what this is made for, where that is held.
at::Tensor make_again(const RecipePtr& recipe, const at::Tensor* leaves, const Visited& first, int64_t user,
                      int level = 0, bool* own = nullptr, const Recipe* held = nullptr);

// What the recipe's output is made from, as make_again() would have it; none where the output is held. Others that need
// it soon are no reason to make it: each of them may do without it too.
std::vector<at::Tensor> operands_again(const Recipe& recipe, const at::Tensor* leaves, const Visited& first,
                                       int64_t user, int level);

// t, from what is there as long as somebody keeps it, and not only while t is: the whole of a view, or what the op that
// made it keeps of its result. keeps: the op that the recipe is of keeps t.
Source source_of(const at::Tensor& t, bool keeps);

// The recipe of t, where it has one that holds and is worth it, and its leaves in the order of place().
RecipePtr usable_recipe(const at::Tensor& t, std::vector<at::Tensor>& leaves);

}  // namespace tsmem
