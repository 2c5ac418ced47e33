// tsmem::autocast(self, method, arguments, dtype) is self.method(*arguments) under autocast to dtype, "bf16" or "f16",
// on the devices of its arguments and parameters: torch.autocast, written into the model. As with torch.autocast,
// gradients of parameters have their dtype and backward runs each op as forward did. Outputs of that dtype are given
// back as float32 where the model is float32: its callers see the original's. In float64 autocast casts nothing.
//
// (A `with autocast` in scripted code would not do: TorchScript lowers it to casts of its own operators, and custom
// ones never see it.)
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/api/module.h>

#include "common.h"
#include "method_call.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IValue;
using at::Tensor;

// Autocast's thread-local state, by eager mode's lists, for as long as this lives.
class Autocast {
 public:
  Autocast(const std::vector<Tensor>& tensors, at::ScalarType dtype) {
    for (const Tensor& t : tensors) {
      const at::DeviceType d = t.device().type();
      const auto known = [&](const Before& b) { return b.device == d; };
      if (!at::autocast::is_autocast_available(d) || std::any_of(before_.begin(), before_.end(), known)) continue;
      before_.push_back({d, at::autocast::is_autocast_enabled(d), at::autocast::get_autocast_dtype(d)});
      at::autocast::set_autocast_enabled(d, true);
      at::autocast::set_autocast_dtype(d, dtype);
    }
    eager_before_ = follow_eager_autocast(true);
    at::autocast::increment_nesting();
    // Casts of weights are shared by the ops of one call alone: an autocast around may last while weights, grad mode or
    // dtype change.
    at::autocast::clear_cache();
  }
  ~Autocast() {
    follow_eager_autocast(eager_before_);
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    for (const Before& b : before_) {
      at::autocast::set_autocast_enabled(b.device, b.enabled);
      at::autocast::set_autocast_dtype(b.device, b.dtype);
    }
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  struct Before {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<Before> before_;
  bool eager_before_;
};

IValue autocast(const IValue& self, const std::string& method, const IValue& arguments, const std::string& dtype) {
  TORCH_CHECK(self.isModule(), "tsmem::autocast: self is not a module");
  TORCH_CHECK_VALUE(dtype == "bf16" || dtype == "f16", "tsmem::autocast: dtype is '", dtype, "'; use bf16 or f16");
  const at::ScalarType to = dtype == "bf16" ? at::kBFloat16 : at::kHalf;
  std::vector<Tensor> tensors;
  collect(arguments, tensors);
  for (const Tensor& p : torch::jit::Module(self.toObject()).parameters())
    if (p.defined()) tensors.push_back(p);
  IValue result;
  {
    const Autocast guard(tensors, to);
    result = call(self, method, arguments);
  }
  if (std::none_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.scalar_type() == at::kFloat; }))
    return result;
  std::vector<Tensor> outputs;
  collect(result, outputs);
  for (Tensor& t : outputs)
    if (t.scalar_type() == to) t = t.to(at::kFloat);
  const Tensor* next = outputs.data();
  return replace(result, next);
}

}  // namespace

void register_autocast(torch::Library& m) {
  // Runs any code: TorchScript must neither merge nor drop nor move calls.
  m.def(torch::schema("autocast(Any self, str method, Any arguments, str dtype) -> Any",
                      c10::AliasAnalysisKind::CONSERVATIVE),
        [](const IValue& self, const std::string& method, const IValue& arguments, const std::string& dtype) {
          return autocast(self, method, arguments, dtype);
        });
}

}  // namespace tsmem
