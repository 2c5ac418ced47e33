#include "common.h"

#include <torch/csrc/autograd/custom_function.h>

namespace tsmem {

Act parse_act(c10::string_view name, at::ArrayRef<double> args) {
  struct Entry { const char* name; ActKind kind; size_t args; };
  static const Entry entries[] = {
      {"identity", ActKind::identity, 0},   {"relu", ActKind::relu, 0},
      {"hardtanh", ActKind::hardtanh, 2},   {"threshold", ActKind::threshold, 2},
      {"leaky_relu", ActKind::leaky_relu, 1}, {"hardsigmoid", ActKind::hardsigmoid, 0},
      {"silu", ActKind::silu, 0},           {"hardswish", ActKind::hardswish, 0},
      {"gelu", ActKind::gelu, 0},           {"gelu_tanh", ActKind::gelu_tanh, 0},
      {"sigmoid", ActKind::sigmoid, 0},     {"tanh", ActKind::tanh, 0},
      {"elu", ActKind::elu, 3},             {"softplus", ActKind::softplus, 2},
      {"mish", ActKind::mish, 0}};
  for (const Entry& e : entries) {
    if (name != e.name) continue;
    TORCH_CHECK_VALUE(args.size() == e.args, "tsmem: the activation '", e.name, "' takes ", e.args, " arguments, not ", args.size());
    Act act{e.kind};
    if (e.args > 0) act.a = args[0];
    if (e.args > 1) act.b = args[1];
    if (e.args > 2) act.c = args[2];
    return act;
  }
  TORCH_CHECK_VALUE(false, "tsmem: no activation is named '", name, "'");
}

at::Tensor stock_act(const at::Tensor& x, const Act& act) {
  switch (act.kind) {
    case ActKind::identity: return x;
    case ActKind::relu: return at::relu(x);
    case ActKind::hardtanh: return at::hardtanh(x, act.a, act.b);
    case ActKind::threshold: return at::threshold(x, act.a, act.b);
    case ActKind::leaky_relu: return at::leaky_relu(x, act.a);
    case ActKind::hardsigmoid: return at::hardsigmoid(x);
    case ActKind::silu: return at::silu(x);
    case ActKind::hardswish: return at::hardswish(x);
    case ActKind::gelu: return at::gelu(x, "none");
    case ActKind::gelu_tanh: return at::gelu(x, "tanh");
    case ActKind::sigmoid: return at::sigmoid(x);
    case ActKind::tanh: return at::tanh(x);
    case ActKind::elu: return at::elu(x, act.a, act.b, act.c);
    case ActKind::softplus: return at::softplus(x, act.a, act.b);
    case ActKind::mish: return at::mish(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor shape_of(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  if (options.device().is_meta()) return at::empty_strided(sizes, strides, options);
  static int64_t nowhere[2];  // an address to hold; never read, as the callers' backward functions look at shapes alone
  return at::from_blob(nowhere, sizes, strides, options);
}

namespace {
struct Refuse : torch::autograd::Function<Refuse> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList grads, at::TensorList /*inputs*/,
                                                std::string op) {
    ctx->saved_data["op"] = op;
    torch::autograd::variable_list out;
    for (const at::Tensor& g : grads) out.push_back(g.defined() ? g.view_as(g) : g);
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tsmem::", ctx->saved_data["op"].toStringRef(),
                                ": second derivatives are not supported; restore the original with 'tsmem rewrite --restore' for this");
  }
};
}  // namespace

std::vector<at::Tensor> refuse_double_backward(std::vector<at::Tensor> grads, const char* op, at::TensorList inputs) {
  if (!at::GradMode::is_enabled()) return grads;
  // A stand-in for undefined gradients: Function::apply takes defined tensors only.
  std::vector<at::Tensor> defined;
  for (const at::Tensor& g : grads)
    if (g.defined()) defined.push_back(g);
  std::vector<at::Tensor> sources;
  for (const at::Tensor& t : inputs)
    if (t.defined()) sources.push_back(t);
  auto wrapped = Refuse::apply(at::TensorList(defined), at::TensorList(sources), std::string(op));
  size_t i = 0;
  for (at::Tensor& g : grads)
    if (g.defined()) g = wrapped[i++];
  return grads;
}

}  // namespace tsmem
