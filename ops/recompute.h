// Tensors that backward recomputes rather than keeps.
//
// An op whose output is cheap to make from what is kept anyway (batch norm + activation from the convolution's output)
// offers a recipe for it. An op that would keep such an output for its own backward keeps the recipe's sources in its
// place: tensors that others keep too, so they cost nothing. What is a source, what is made from other recipes and what
// is kept after all is decided at every call, from what is alive and who keeps it.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common.h"
#include "recompute_argument.h"
#include "torch_version.h"

namespace tsmem {

// Makes an output again, detached, with its sizes, strides and dtype. Operands that are in `spare` are nobody else's,
// and may be overwritten.
using Make = std::function<at::Tensor(std::vector<at::Tensor>& operands, const std::vector<bool>& spare)>;

struct Recipe;
using RecipePtr = std::shared_ptr<const Recipe>;

enum class Pieces { no, yes };

// Offers to make `output`, the result of a recorded op, from `operands`, all that the op has read (undefined ones
// included). Holds operands weakly: an offer whose operands have gone is void.
//
// recompute: the op's argument of that name (recompute_argument.h), which says whether the offer stands.
//
// Pieces::yes: the output is the operands put together (cat), so that keeping them instead of it never costs memory;
// they are held while the output lives, or until somebody keeps it.
//
// cost: of an op that is expensive (a convolution), or a layer that is cheap.
//
// Rows::own: a row of the output (the last dimension) depends on the same row of the operands of its size, and on
// operands of other sizes: make() takes any number of rows.
//
// form: Form::norm_relu for relu(batch_norm(x)) of the operands x, weight, bias, mean and inverse deviation: kernels
// may compute from these in its place (norm_relu_conv.h). Form::columns: the operands are put together in their last
// dimension.
//
// without_norm: makes the output without its first operand, whose form is norm_relu: from that one's operands, followed
// by the others. operands() makes these, none where the first operand is held, and is called where a kernel may take
// them alone. Undefined where no kernel does.
struct Cost {
  double flops = 0;  // operations, as a product of matrices does them
  // The output is made once in a pass of backward, when it is first needed, and held until the op's own backward.
  bool expensive = false;
};
enum class Rows { all, own };
enum class Form { any, norm_relu, columns };
using MakeWithoutNorm = std::function<at::Tensor(const std::function<std::vector<at::Tensor>()>& operands)>;
void offer(const at::Tensor& output, const std::vector<at::Tensor>& operands, Make make,
           RecomputeArgument recompute = Recompute::shared, Pieces pieces = Pieces::no, Cost cost = {},
           Rows rows = Rows::all, Form form = Form::any, MakeWithoutNorm without_norm = nullptr);

// What a convolution, a linear layer or a product with one matrix gives offer(). Recompute::if_cheap, which the default
// level writes, lets it run again where that is cheap (traits.h), from the input that it keeps for its weight's
// gradient, or that others keep. That is a leaf, or not larger than the output, and the layers by which it and the
// weight are themselves made again take at most half of this one's operations.
struct LayerOffer {
  RecomputeArgument recompute;
  Cost cost;
};
// other: what else it reads (the sum's first term, of a product that is added to one), or undefined.
LayerOffer as_cheap_layer(RecomputeArgument recompute, const at::Tensor& output, const at::Tensor& input,
                          const at::Tensor& weight, const at::Tensor& other, double flops, bool depthwise = false);

// The same of a product of two batches of matrices, each of which the other one's gradient needs: both are kept anyway.
LayerOffer as_cheap_product(RecomputeArgument recompute, const at::Tensor& output, const at::Tensor& a,
                            const at::Tensor& b, const at::Tensor& other, double flops);

// The same of attention, of which query (batches, heads, rows, features of a head), key and value are kept anyway.
RecomputeArgument as_cheap_attention(RecomputeArgument recompute, const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value, bool causal);

// The backward of the op that made `output`, whose place in forward is `user`, takes what others have made of it again,
// which is held for it where it comes soon after them: then it has no need of what that is made from.
void takes_own_output(const at::Tensor& output, int64_t user);
// In that backward, before SavedTensors: what is held of the output; undefined: nothing.
at::Tensor own_output_made();

// Whether saved-tensor hooks (torch.utils.checkpoint, save_on_cpu) are set: then nothing is recomputed, as they count
// and replace what is saved.
bool hooks_active();

// Runs f once, when the pass of backward that runs on this thread has ended or failed. False: there is none, and f is
// dropped.
bool when_pass_ends(std::function<void()> f);

// The operations of the cheap layers by which t is made again; 0: there are none, or it is kept.
double layers_of(const at::Tensor& t);

// Whether a node may keep t for nothing: others keep it, or it is recomputed from what others keep.
bool costs_nothing(const at::Tensor& t);

// The op that made `output` keeps it for its own backward, as `result`: what Keeper::add_result() has returned.
void keeps_itself(const at::Tensor& output, const at::Tensor& result);

// Whether the first operand's memory may take the result of an elementwise op on both.
bool may_overwrite_first(const std::vector<at::Tensor>& operands, const std::vector<bool>& spare);

// Autocast's cast of an operand of an op with this argument. An op that would keep the cast makes it again, as that of
// a parameter, of which PyTorch keeps a second copy; where the argument offers nothing, that of a parameter alone.
at::Tensor cast_for_autocast(at::ScalarType to, const at::Tensor& t, at::DeviceType device,
                             RecomputeArgument recompute = Recompute::off);
OptTensor cast_for_autocast(at::ScalarType to, const OptTensor& t, at::DeviceType device,
                            RecomputeArgument recompute = Recompute::off);

// as_scripted(), whose cast is made again where the argument offers it.
at::Tensor as_scripted(const at::Tensor& t, RecomputeArgument recompute);

// The recipe of a product.
at::Tensor multiply_again(std::vector<at::Tensor>& operands, const std::vector<bool>& spare);

// Which node's output a tensor is, where what is kept is not the tensor itself. The nodes of operands live as long as
// the node that keeps this.
struct GraphPlace {
  WeakNodePtr node{NodePtr()};
  uint32_t output = 0;
  bool known = false;  // else the tensor itself is kept
};

// What a node keeps, in forward: add() the tensors in order, then save().
class Keeper {
 public:
  // Keeps t, or what it is made from; undefined: nothing. `always_itself`: never recomputed (masks, statistics).
  void add(const at::Tensor& t, bool always_itself = false);
  // Keeps the node's own result. Returns what recipes start from in its place, which is there as long as the node keeps
  // it: the tensor itself may go before. Undefined where hooks see what is kept.
  at::Tensor add_result(const at::Tensor& result);
  // Keeps `copy`, or nothing, of one of the node's operands, whose place in the graph backward can give it.
  void add_copy(const at::Tensor& copy, const at::Tensor& operand);
  // The node's place in forward. soon: what others make again is held for it where it comes soon after them.
  int64_t save(torch::autograd::AutogradContext* ctx, bool soon = true);

 private:
  std::vector<at::Tensor> leaves_;
  at::Tensor result_;               // kept after the slots
  std::vector<RecipePtr> recipes_;  // one a slot; null: the tensor itself
  std::vector<GraphPlace> graph_;   // one a slot
};

// The other end, in backward. Unpacks everything once, which raises PyTorch's errors for freed graphs and for tensors
// changed in place; where the latter are only there to make others, with a sentence of ours.
class SavedTensors {
 public:
  explicit SavedTensors(torch::autograd::AutogradContext* ctx);
  ~SavedTensors();
  SavedTensors(const SavedTensors&) = delete;
  SavedTensors& operator=(const SavedTensors&) = delete;
  // Tensor number `slot` of those added; undefined where that was. One that is recomputed is made at every call, unless
  // it is held for others. Under create_graph it has the place in the graph that the tensor had in forward.
  at::Tensor operator[](size_t slot) const;
  // The same place for `value`, which is that tensor computed in another way.
  at::Tensor in_graph(size_t slot, const at::Tensor& value) const;
  // f(first row, rows) for the rows of tensor `slot` as a matrix of its last dimension, in order: all at once, or,
  // where they can be made a few at a time, in blocks that stay in cache, so that the whole is never there. Under
  // create_graph all at once.
  void by_rows(size_t slot, const std::function<void(int64_t first, const at::Tensor& rows)>& f) const;
  // The operands of tensor `slot`, where it has that form and is not held as a whole; else none. None under
  // create_graph.
  std::vector<at::Tensor> operands_of(size_t slot, Form form) const;
  // Whether operator[] makes it.
  bool made(size_t slot) const;

 private:
  std::vector<at::Tensor> leaves_;
  std::vector<RecipePtr> recipes_;
  std::vector<GraphPlace> graph_;
  int64_t user_ = 0;                                               // the node's place in forward
  std::vector<size_t> first_;                                      // of each slot: its first leaf
  std::vector<std::unordered_map<const Recipe*, size_t>> places_;  // and that of each recipe that it is made by
};

}  // namespace tsmem
