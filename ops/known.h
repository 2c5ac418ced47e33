// What is known of the tensors that recorded ops have made: the recipe offered for them, and who keeps them.
#pragma once
#include <cstdint>
#include <optional>

#include "recompute.h"
#include "torch_version.h"

namespace tsmem {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What is known of a node's first output while the node lives, and who keeps the others.
struct OutputRecord {
  WeakNodePtr node{NodePtr()};
  RecipePtr recipe;
  uint32_t version = 0;  // of the output when the recipe was offered
  uint64_t kept = 0;     // which of the node's first 64 outputs somebody keeps for backward, a bit each
  int value = -1;        // in the journal
  // What the node keeps of it for its own backward (Keeper::add_result); none: nothing, or its backward has run.
  std::optional<WeakTensor> result;
  // Called with the output when somebody first keeps it, and not again: what its own node keeps may be had from it.
  void (*when_kept)(const at::Tensor& output) = nullptr;
};

// f(known) of a node under the lock; makes the entry where it is missing.
void update_known(const NodePtr& node, const std::function<void(OutputRecord&)>& f);

// Nothing where the node has gone or nothing is known of it.
std::optional<OutputRecord> known_of(const torch::autograd::Node* node);

// The same of the node whose first output t is.
std::optional<OutputRecord> known_of(const at::Tensor& t);

// The tensor that t is a view of, or t.
at::Tensor owner(const at::Tensor& t);

// An expanded tensor has no more than its storage.
size_t bytes_of(const at::Tensor& t);

// Kept without further cost: somebody keeps it for backward, or it's a parameter.
bool kept_anyway(const at::Tensor& t);

// Somebody keeps t for backward now.
void mark_kept(const at::Tensor& t);

// The output holds these while it lives, or until somebody keeps it: sources of its recipe that nobody else may keep.
void hold(const at::Tensor& output, std::vector<at::Tensor> sources);
void let_go(const at::Tensor& output);

}  // namespace tsmem
