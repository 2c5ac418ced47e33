// One call of a model, what it left behind, and how far two calls are apart.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace tsmem {

// Makes copies that share no compiled code with the module: the first call is a first call. Parameters are most of a
// large model, and few models overwrite them: they are not written and read again, and may be shared.
class Copier {
 public:
  Copier(const torch::jit::Module& m, const std::string& device);

  // The copy's parameters share the memory of those of `values` that have the same names and strides. Others have the
  // module's values in memory of their own.
  torch::jit::Module operator()(const torch::jit::Module* values = nullptr);

 private:
  const torch::jit::Module module_;
  const c10::Device device_;
  std::set<std::string> left_out_;  // parameters that are not in bytes_
  std::stringstream bytes_;
};

// A run has overwritten a parameter that it may share with other copies.
struct OverwritesParameter {};

struct Named {
  std::string name;
  at::Tensor value;          // undefined: no gradient
  mutable double size = -1;  // its norm, where known
};

// What an output is that is no matter of degree: its dtype, whether it requires a gradient, its layout, whose memory it
// is in. `text` is what a sentence says of it: "is Float", "is in the memory of input 0".
struct Trait {
  enum class Kind { dtype, requires_grad, layout, memory };
  std::string output;
  Kind kind;
  std::string text;
};
inline const std::string kRequiresNone = "requires no gradient";

// What one call left behind.
struct Outcome {
  std::string error;           // of the call that raised
  std::vector<Named> outputs;  // what isn't a tensor is one of its value, or of a hash of it
  std::vector<Trait> traits;   // of the outputs that are tensors
  std::vector<Named> gradients, inputs;
  std::vector<Named> buffers;      // and other attributes, and the parameters that it has overwritten
  std::vector<at::Tensor> random;  // generator states
  double seconds = 0;              // of forward and backward
};

struct Errors {
  double output = 0, gradient = 0, buffer = 0;
  double worst() const { return std::max({output, gradient, buffer}); }
  void add(const Errors& e) {
    output = std::max(output, e.output);
    gradient = std::max(gradient, e.gradient);
    buffer = std::max(buffer, e.buffer);
  }
};

// How a call is made. Gradients of the outputs are drawn from the seed (cotangents()).
struct Run {
  std::string method;
  c10::Device device;
  bool grad, input_grad;
  bool shares_parameters = false;  // with other copies: then it throws OverwritesParameter where it overwrites one
  bool unseen_writes = false;      // a parameter may be overwritten and no version count it (.data): all are compared
  bool backward = true;
  const std::set<const c10::ivalue::Object*>* as_written = nullptr;  // modules that run without TorchScript's optimiser

  // Calls the method on copies of the inputs, and backward where there is something to differentiate. An exception is
  // in Outcome::error.
  Outcome operator()(torch::jit::Module& m, const std::vector<c10::IValue>& given, uint64_t seed) const;
};

// In relative norms: of each group of tensors the worst, where one that is far smaller than the others is held against
// those. Infinity where shapes differ, or one is NaN where the other is not.
Errors errors(const Outcome& u, const Outcome& v);

// The same of one group.
double worst(const std::vector<Named>& us, const std::vector<Named>& vs);

// The norm of what is finite in a value.
double size_of(const Named& v);

// The 2-norm in float64.
double norm_of(const at::Tensor& t);

// Casts every floating-point tensor of the module tree in place, also those in lists and dicts.
void to_double(const torch::jit::Module& m);

at::Tensor channels_last(const at::Tensor& t);

// The inputs of the n-th call: those given, then with a little noise, which keeps their meaning (boxes stay boxes).
std::vector<c10::IValue> vary(const std::vector<c10::IValue>& inputs, int n, double size, uint64_t seed);

std::vector<c10::IValue> in_double(const std::vector<c10::IValue>& inputs);

double epsilon_of(at::ScalarType t);

// The coarsest floating-point type among parameters, inputs and outputs decides what rounding is.
double epsilon_of(const torch::jit::Module& m, const std::vector<c10::IValue>& inputs);

// A tensor each: "3x3x64x64 float32".
std::vector<std::string> described(const std::vector<c10::IValue>& inputs);

}  // namespace tsmem
