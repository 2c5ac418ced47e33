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

template <class Row>
c10::OperatorHandle operator_of(const std::string& ending) {
  const ActInfo info = act_info<Row>();
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + (info.operator_name + ending)).c_str(), "");
}

// Calls PyTorch's operator, whose arguments are those of the activation behind `first`.
template <class Row, class... First>
at::Tensor call_operator(const char* ending, const Act& act, const First&... first) {
  using Number = const at::Scalar&;
  if constexpr (Row::approximate != nullptr) {
    static const auto op = operator_of<Row>(ending).template typed<at::Tensor(const First&..., c10::string_view)>();
    return op.call(first..., Row::approximate);
  } else if constexpr (Row::arguments == 0) {
    static const auto op = operator_of<Row>(ending).template typed<at::Tensor(const First&...)>();
    return op.call(first...);
  } else if constexpr (Row::arguments == 1) {
    static const auto op = operator_of<Row>(ending).template typed<at::Tensor(const First&..., Number)>();
    return op.call(first..., act.a);
  } else if constexpr (Row::arguments == 2) {
    static const auto op = operator_of<Row>(ending).template typed<at::Tensor(const First&..., Number, Number)>();
    return op.call(first..., act.a, act.b);
  } else {
    static const auto op =
        operator_of<Row>(ending).template typed<at::Tensor(const First&..., Number, Number, Number)>();
    return op.call(first..., act.a, act.b, act.c);
  }
}

}  // namespace

at::Tensor aten_act(const at::Tensor& input, const Act& act) {
  if (is_celu(act)) return at::celu(input, act.a);
  at::Tensor out;
  with_row(act.kind, [&](auto row) {
    const at::Tensor x = row.scripted_in_float ? as_scripted(input) : input;
    if constexpr (row.saves == ActSaves::nothing)
      out = x;
    else
      out = call_operator<decltype(row)>("", act, x);
  });
  return out;
}

at::Tensor aten_act_backward(const at::Tensor& grad, const at::Tensor& x, const Act& act, at::Tensor own) {
  if (own.defined() && act.kind == ActKind::silu) return at::silu_backward_out(own, grad, x);
  if (const char* approximate = info_of(act.kind).approximate; approximate && own.defined())
    return at::gelu_backward_out(own, grad, x, approximate);
  // The one whose derivative may also be taken from the output.
  if (act.kind == ActKind::elu)
    return at::elu_backward(grad, act.a, act.b, acts::Elu::scale_in_backward(numbers_of<double>(act)),
                            /*is_result=*/false, x);
  at::Tensor out;
  with_row(act.kind, [&](auto row) {
    if constexpr (row.saves == ActSaves::input) out = call_operator<decltype(row)>("_backward", act, grad, x);
  });
  TORCH_INTERNAL_ASSERT(out.defined());
  return out;
}

bool autocast_casts(const at::Tensor& x, const Act& act) {
  const auto device = x.device().type();
  if (info_of(act.kind).scripted_in_float && low_precision(x) && scripted_autocast(device)) return true;
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return false;
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  if (c10::impl::tls_is_dispatch_key_excluded(key)) return false;
  bool casts = false;
  with_row(act.kind, [&](auto row) {
    if constexpr (row.saves != ActSaves::nothing) casts = operator_of<decltype(row)>("").hasKernelForDispatchKey(key);
  });
  return casts;
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
