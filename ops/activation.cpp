#include "activation.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "common.h"

namespace tsmem {

Act parse_act(c10::string_view name, at::ArrayRef<double> args) {
  struct Entry {
    const char* name;
    ActKind kind;
    size_t args;
  };
  static const Entry entries[] = {{"identity", ActKind::identity, 0},
                                  {"relu", ActKind::relu, 0},
                                  {"hardtanh", ActKind::hardtanh, 2},
                                  {"threshold", ActKind::threshold, 2},
                                  {"leaky_relu", ActKind::leaky_relu, 1},
                                  {"hardsigmoid", ActKind::hardsigmoid, 0},
                                  {"silu", ActKind::silu, 0},
                                  {"hardswish", ActKind::hardswish, 0},
                                  {"gelu", ActKind::gelu, 0},
                                  {"gelu_tanh", ActKind::gelu_tanh, 0},
                                  {"sigmoid", ActKind::sigmoid, 0},
                                  {"tanh", ActKind::tanh, 0},
                                  {"elu", ActKind::elu, 3},
                                  {"softplus", ActKind::softplus, 2},
                                  {"mish", ActKind::mish, 0}};
  for (const Entry& e : entries) {
    if (name != e.name) continue;
    TORCH_CHECK_VALUE(args.size() == e.args, "tsmem: the activation '", e.name, "' takes ", e.args, " arguments, not ",
                      args.size());
    Act act{e.kind};
    if (e.args > 0) act.a = args[0];
    if (e.args > 1) act.b = args[1];
    if (e.args > 2) act.c = args[2];
    return act;
  }
  TORCH_CHECK_VALUE(false, "tsmem: no activation is named '", name, "'");
}

namespace {
// The activations that TorchScript's autocast runs in float32.
bool runs_in_float(ActKind kind) {
  return kind == ActKind::gelu || kind == ActKind::gelu_tanh || kind == ActKind::softplus;
}
}  // namespace

at::Tensor stock_act(const at::Tensor& input, const Act& act) {
  const at::Tensor x = runs_in_float(act.kind) ? as_scripted(input) : input;
  switch (act.kind) {
    case ActKind::identity:
      return x;
    case ActKind::relu:
      return at::relu(x);
    case ActKind::hardtanh:
      return at::hardtanh(x, act.a, act.b);
    case ActKind::threshold:
      return at::threshold(x, act.a, act.b);
    case ActKind::leaky_relu:
      return at::leaky_relu(x, act.a);
    case ActKind::hardsigmoid:
      return at::hardsigmoid(x);
    case ActKind::silu:
      return at::silu(x);
    case ActKind::hardswish:
      return at::hardswish(x);
    case ActKind::gelu:
      return at::gelu(x, "none");
    case ActKind::gelu_tanh:
      return at::gelu(x, "tanh");
    case ActKind::sigmoid:
      return at::sigmoid(x);
    case ActKind::tanh:
      return at::tanh(x);
    case ActKind::elu:
      return at::elu(x, act.a, act.b, act.c);
    case ActKind::softplus:
      return at::softplus(x, act.a, act.b);
    case ActKind::mish:
      return at::mish(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

namespace {
const char* stock_name(ActKind kind) {
  switch (kind) {
    case ActKind::identity:
      return nullptr;
    case ActKind::relu:
      return "aten::relu";
    case ActKind::hardtanh:
      return "aten::hardtanh";
    case ActKind::threshold:
      return "aten::threshold";
    case ActKind::leaky_relu:
      return "aten::leaky_relu";
    case ActKind::hardsigmoid:
      return "aten::hardsigmoid";
    case ActKind::silu:
      return "aten::silu";
    case ActKind::hardswish:
      return "aten::hardswish";
    case ActKind::gelu:
    case ActKind::gelu_tanh:
      return "aten::gelu";
    case ActKind::sigmoid:
      return "aten::sigmoid";
    case ActKind::tanh:
      return "aten::tanh";
    case ActKind::elu:
      return "aten::elu";
    case ActKind::softplus:
      return "aten::softplus";
    case ActKind::mish:
      return "aten::mish";
  }
  return nullptr;
}
}  // namespace

bool autocast_casts(const at::Tensor& x, const Act& act) {
  const char* name = stock_name(act.kind);
  const auto device = x.device().type();
  if (runs_in_float(act.kind) && low_precision(x) && scripted_autocast(device)) return true;
  if (!name || !at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return false;
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  return op && op->hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(device));
}

void save_act(torch::autograd::AutogradContext* ctx, const Act& act) {
  ctx->saved_data["act_kind"] = static_cast<int64_t>(act.kind);
  ctx->saved_data["act_arguments"] = std::vector<double>{act.a, act.b, act.c};
}

Act saved_act(torch::autograd::AutogradContext* ctx) {
  const auto kind = static_cast<ActKind>(ctx->saved_data["act_kind"].toInt());
  const auto arguments = ctx->saved_data["act_arguments"].toDoubleVector();
  return {kind, arguments[0], arguments[1], arguments[2]};
}

}  // namespace tsmem
