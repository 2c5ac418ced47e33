#include "activation.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "act_table.h"
#include "common.h"

namespace tsmem {

Act parse_act(c10::string_view name, at::ArrayRef<double> args) {
  for (const ActInfo& info : kActivations) {
    if (name != info.name) continue;
    const auto arguments = static_cast<size_t>(info.arguments);
    TORCH_CHECK_VALUE(args.size() == arguments, "tsmem: the activation '", name, "' takes ", arguments,
                      " arguments, not ", args.size());
    Act act{info.kind};
    if (arguments > 0) act.a = args[0];
    if (arguments > 1) act.b = args[1];
    if (arguments > 2) act.c = args[2];
    return act;
  }
  TORCH_CHECK_VALUE(false, "tsmem: no activation is named '", name, "'");
}

namespace {

// PyTorch's operators of one activation.
struct Operators {
  std::optional<c10::OperatorHandle> forward, backward;
};

const Operators& operators_of(ActKind kind) {
  static const auto all = [] {
    std::vector<Operators> found;
    for (const ActInfo& info : kActivations) {
      const auto find = [&](const char* ending) -> std::optional<c10::OperatorHandle> {
        if (!info.operator_name) return std::nullopt;
        return c10::Dispatcher::singleton().findSchema({std::string("aten::") + info.operator_name + ending, ""});
      };
      found.push_back({find(""), find("_backward")});
    }
    return found;
  }();
  return all[static_cast<size_t>(kind)];
}

template <class... A>
at::Tensor call(const c10::OperatorHandle& op, A... arguments) {
  return op.typed<at::Tensor(A...)>().call(arguments...);
}

// An operator whose arguments are those of the activation, behind `first`.
template <class... First>
at::Tensor call_act(const c10::OperatorHandle& op, const Act& act, const First&... first) {
  using Number = const at::Scalar&;
  const ActInfo& info = info_of(act.kind);
  if (info.approximate) return call<const First&..., c10::string_view>(op, first..., info.approximate);
  switch (info.arguments) {
    case 0:
      return call<const First&...>(op, first...);
    case 1:
      return call<const First&..., Number>(op, first..., act.a);
    case 2:
      return call<const First&..., Number, Number>(op, first..., act.a, act.b);
    default:
      return call<const First&..., Number, Number, Number>(op, first..., act.a, act.b, act.c);
  }
}

}  // namespace

at::Tensor stock_act(const at::Tensor& input, const Act& act) {
  const at::Tensor x = info_of(act.kind).scripted_in_float ? as_scripted(input) : input;
  const auto& op = operators_of(act.kind).forward;
  return op ? call_act(*op, act, x) : x;
}

at::Tensor stock_act_backward(const at::Tensor& grad, const at::Tensor& x, const Act& act, at::Tensor own) {
  if (own.defined() && act.kind == ActKind::silu) return at::silu_backward_out(own, grad, x);
  if (own.defined() && info_of(act.kind).approximate)
    return at::gelu_backward_out(own, grad, x, info_of(act.kind).approximate);
  // The one whose derivative may also be taken from the output.
  if (act.kind == ActKind::elu) return at::elu_backward(grad, act.a, act.b, act.c, /*is_result=*/false, x);
  const auto& op = operators_of(act.kind).backward;
  TORCH_INTERNAL_ASSERT(op);
  return call_act(*op, act, grad, x);
}

bool autocast_casts(const at::Tensor& x, const Act& act) {
  const auto device = x.device().type();
  if (info_of(act.kind).scripted_in_float && low_precision(x) && scripted_autocast(device)) return true;
  const auto& op = operators_of(act.kind).forward;
  if (!op || !at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return false;
  return op->hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(device));
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
