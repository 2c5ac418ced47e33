// One form for the many spellings of an operator: relu, relu_, F.relu, nn.ReLU; conv2d and a traced _convolution stay
// apart.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "rewriter/rewrite/view.h"

namespace tsmem {

struct CanonicalOp {
  std::string name;            // "act", "add", "mul", "batch_norm", …; empty for what no pattern can mean
  std::vector<Value*> inputs;  // act, add, mul: the tensors alone; add_number, mul_number: a tensor and a number;
                               // others: all arguments
  std::string act;             // name and arguments of an activation, as ops/act.h has them
  std::vector<double> act_args;
  bool in_place = false;  // overwrites its first input
  std::string trouble;    // why a node that looks like this operator can't be taken for it
};

CanonicalOp canonical(Node* n);

// An activation's name in PyTorch ("relu6"), without a trailing underscore, or in ops/act_table.h ("gelu_tanh").
struct KnownActivation {
  std::string act;            // canonical name
  std::vector<double> fixed;  // arguments that the spelling implies
  size_t from_inputs = 0;     // else: that many, from input 1 on
};
std::optional<KnownActivation> known_activation(const std::string& name);

// Never None, as an optional one may be.
bool is_tensor(const Value* v);

// True where the operator's result is memory of its own: no view or alias of an argument.
bool makes_fresh_tensor(const Node* n);

// Of any kind, not in place: the result may be the argument itself.
bool is_dropout(c10::Symbol kind);

// Of any kind, in place too, with p = 0: its result is its argument itself and it draws nothing, in training too
// (ATen/native/Dropout.cpp), but where TorchScript differentiates it (autodiff.h).
bool drops_nothing(const Node* n);

// Whether its result may be one of its arguments, or a view of it, although its schema does not say so.
bool may_give_its_argument(const Node* n);

// Whether the results are the first argument or views of it, by the schema, and of nothing else.
bool gives_part_of_first(const Node* n);

// True where the operator neither writes to its arguments nor returns an alias of them, and has no blocks.
bool only_reads(const Node* n);

}  // namespace tsmem
