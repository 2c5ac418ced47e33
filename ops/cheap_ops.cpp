// The operators of cheap_table.h: PyTorch's own, run by the dispatcher, with two things added.
//
// Each offers its output to be recomputed from its operands. Those whose backward reads an operand or the result keep
// what is cheaper: an operand by what it is made from, and the result only where the operands that it is made from cost
// something. All others keep what PyTorch's keep: sizes, indices, masks.
#include <ATen/autocast_mode.h>

#include "cheap_table.h"

#include <algorithm>

#include "derivatives.h"
#include "function.h"
#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::IValue;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

c10::OperatorHandle aten(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), overload.c_str());
}

// What is known of a row when its operator is registered.
struct Op : torch::CustomClassHolder {
  explicit Op(const CheapOp& r)
      : row(r),
        derivative(derivative_of(r.full_name())),
        hacked_twin(r.overload() == "Tensor_hacked_twin"),
        original(aten(std::string(r.name()), hacked_twin ? "Tensor" : std::string(r.overload()))),
        listed(pieces()                ? aten("cat", "")
               : r.name() == "square"  ? aten("pow", "Tensor_Scalar")
               : r.overload() == "vec" ? aten(std::string(r.name()), "")
                                       : original),
        dtype_at(original.schema().argumentIndexWithName("dtype")) {
    if (!r.in_place || !r.schema.substr(r.full_name().size()).starts_with("(Tensor"))
      return;                            // a number isn't written to
    std::string overload(r.overload());  // pow_.Scalar is pow.Tensor_Scalar's
    overload.erase(0, overload.rfind('_') + 1);
    overwriting = aten(std::string(r.name()) + "_", overload);
  }
  const CheapOp& row;
  const Derivative* derivative;
  bool hacked_twin;  // index with a list of tensors, none of which is left out
  c10::OperatorHandle original;
  c10::OperatorHandle listed;   // what autocast's lists name: of an operator that composes others, one of these
  std::optional<int> dtype_at;  // the argument that says the result's dtype: with it autocast leaves the operands alone
  std::optional<c10::OperatorHandle> overwriting;
  // A cast reads the dtype of other operands alone.
  bool cast() const { return row.name() == "type_as"; }
  // A list's tensors put together: keeping them costs no more than keeping the result.
  bool pieces() const { return row.schema.find("(Tensor[] ") != row.schema.npos; }
  // What autocast casts to the widest dtype of its operands; all else on its lists here it casts to float32.
  bool promotes(at::DeviceType device) const {
    return pieces() || row.name() == "addcmul" || row.name() == "addcdiv" || row.name() == "atan2" ||
           (row.name() == "grid_sampler" && device != at::kCPU);
  }
};
using OpPtr = c10::intrusive_ptr<Op>;

// A call's arguments, with its tensors apart, in order.
struct CheapCall : torch::CustomClassHolder {
  explicit CheapCall(OpPtr o) : op(std::move(o)) {}
  OpPtr op;
  std::vector<std::vector<int64_t>> sizes;  // of the tensors, where backward asks for them
  std::vector<IValue> arguments;  // with nothing where a tensor was, and an empty list where a list of them was
  std::vector<std::pair<size_t, int64_t>> places;  // argument, and how many tensors it has; -1: it is one

  std::vector<Tensor> take(Stack& all) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < all.size(); ++i) {
      IValue& v = all[i];
      if (v.isTensor()) {
        places.emplace_back(i, -1);
        tensors.push_back(std::move(v).toTensor());
        v = IValue();
      } else if (v.isTensorList()) {
        const auto list = v.toTensorVector();
        places.emplace_back(i, list.size());
        tensors.insert(tensors.end(), list.begin(), list.end());
        v = c10::List<Tensor>();
      } else if (v.isOptionalTensorList()) {
        const auto list = v.toOptionalTensorVector();
        places.emplace_back(i, list.size());
        for (const auto& t : list) tensors.push_back(value_or_undefined(t));
        v = c10::List<std::optional<Tensor>>();
      }
    }
    arguments = std::move(all);
    return tensors;
  }
  Stack with(const std::vector<Tensor>& tensors) const {
    Stack stack(arguments.begin(), arguments.end());
    size_t next = 0;
    for (const auto& [at, count] : places) {
      if (count < 0) {
        stack[at] = tensors[next++];
      } else if (arguments[at].isTensorList() && !op->hacked_twin) {
        c10::List<Tensor> list;
        for (int64_t i = 0; i < count; ++i) list.push_back(tensors[next++]);
        stack[at] = std::move(list);
      } else {
        c10::List<std::optional<Tensor>> list;
        for (int64_t i = 0; i < count; ++i) list.push_back(optional(tensors[next++]));
        stack[at] = std::move(list);
      }
    }
    return stack;
  }
  Tensor run(const std::vector<Tensor>& tensors) const {
    Stack stack = with(tensors);
    op->original.callBoxed(&stack);
    return stack[0].toTensor();
  }
};
using CallPtr = c10::intrusive_ptr<CheapCall>;

// The backward of an operator that has a Derivative.
struct Cheap : Function<Cheap> {
  // What becomes of a result that backward reads: it is kept, or made again for others too and then held for this node,
  // which is the result's user number `place` (else -1).
  struct Result {
    std::optional<Tensor> kept;  // as Keeper::add_result() gives it
    int64_t place = -1;
  };

  static Tensor forward(AutogradContext* ctx, at::TensorList operands, const CallPtr& call, bool recomputes,
                        Result* result) {
    ctx->set_materialize_grads(false);
    const std::vector<Tensor> tensors = operands.vec();
    const auto& formulas = call->op->derivative->operands;
    unsigned reads = 0;
    bool free = recomputes;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].requires_grad()) reads |= formulas[i].reads;
      free = free && costs_nothing(tensors[i]) && !(call->op->row.slow && layers_of(tensors[i]) > 0);
      call->sizes.push_back(tensors[i].sizes().vec());
    }
    Tensor out;
    {
      at::AutoDispatchBelowADInplaceOrView below;  // else the output counts as a view of a temporary
      out = call->run(tensors);
    }
    // A result that is small is not worth making again.
    const bool again = (reads & kResult) && free && 4 * out.numel() >= tensors[0].numel();
    const bool alone = again && reads == kResult;
    Keeper keeper;
    for (size_t i = 0; i < tensors.size(); ++i) keeper.add((reads & 1u << i) || again ? tensors[i] : Tensor());
    if ((reads & kResult) && !again)
      result->kept = keeper.add_result(out);
    else
      keeper.add(Tensor());
    const int64_t place = keeper.save(ctx, /*soon=*/!alone);
    if (alone) result->place = place;
    ctx->saved_data["call"] = IValue::make_capsule(call);
    ctx->saved_data["again"] = again;
    return out;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const auto call = c10::static_intrusive_pointer_cast<CheapCall>(ctx->saved_data["call"].toCapsule());
    const auto& formulas = call->op->derivative->operands;
    const size_t count = call->sizes.size();
    variable_list g(count + 3);
    if (!grads[0].defined()) return g;
    const auto together = call->op->derivative->together;
    unsigned reads = 0;
    std::vector<bool> wanted(count);
    for (size_t i = 0; i < count; ++i) {
      wanted[i] = (formulas[i].of || together) && ctx->needs_input_grad(i);
      if (wanted[i]) reads |= formulas[i].reads;
    }
    const bool again = (reads & kResult) && ctx->saved_data["again"].toBool();
    // Under create_graph it is made from the operands, through which it is differentiated.
    const Tensor own = again && !at::GradMode::is_enabled() ? own_output_made() : Tensor();
    const SavedTensors kept(ctx);
    BackwardCall now{grads[0], std::vector<Tensor>(count), call->arguments, call->sizes[0]};
    for (size_t i = 0; i < count; ++i)
      if ((reads & 1u << i) || (again && !own.defined())) now.values[i] = kept[i];
    now.values.push_back(own.defined()     ? own
                         : again           ? call->run(now.values)
                         : reads & kResult ? kept[count]
                                           : Tensor());
    std::vector<Tensor> made(count);
    if (together) made = together(now, wanted);
    // Small ones first, as PyTorch has them: a large one that waits would lie beside the others' temporaries.
    for (const bool large : {false, true})
      for (size_t i = 0; i < count; ++i)
        if (wanted[i] && !together && large == (c10::IntArrayRef(call->sizes[i]) == grads[0].sizes()))
          made[i] = formulas[i].of(now).sum_to_size(call->sizes[i]);
    std::copy(made.begin(), made.end(), g.begin());
    return g;
  }
};

// Whether our autograd function and recipes apply to all operands: dense ones of one device, floating point or not, and
// numbers that a trace has made tensors of.
bool usable(const std::vector<Tensor>& tensors) {
  bool any = false;
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    const bool number = t.dim() == 0 && t.is_cpu() && !t.requires_grad();
    if (!number && t.device() != tensors[0].device()) return false;
    if (t.is_floating_point() ? !plain(t) : t.layout() != at::kStrided || t.is_complex() || t.is_nested()) return false;
    any = any || t.requires_grad();
  }
  return any && at::GradMode::is_enabled();
}

// Whether the operator that writes to its first operand would give what the one gives that makes a new tensor.
bool same_as_overwriting(const std::vector<Tensor>& tensors, const std::vector<IValue>& arguments) {
  if (!tensors[0].is_floating_point()) return false;
  for (const IValue& v : arguments)
    if (v.isComplexDouble()) return false;
  return std::all_of(tensors.begin() + 1, tensors.end(), [&](const Tensor& t) { return same_in_place(tensors[0], t); });
}

// The key of eager mode's autocast, where it is on.
std::optional<c10::DispatchKey> autocast_key(at::DeviceType device) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  if (c10::impl::tls_is_dispatch_key_excluded(key)) return std::nullopt;
  return key;
}

// Whether autocast, which casts some operands to the widest dtype among them, would cast none.
bool promoted(const std::vector<Tensor>& tensors, at::DeviceType device) {
  const auto dtype = tensors[0].scalar_type();
  if (dtype != at::kFloat && dtype != at::autocast::get_autocast_dtype(device)) return false;
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.scalar_type() == dtype; });
}

struct Kernel : c10::OperatorKernel {
  explicit Kernel(OpPtr o) : op(std::move(o)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    const int64_t in_place = op->row.in_place ? torch::jit::pop(*stack).toInt() : 0;
    const RecomputeArgument recompute = torch::jit::pop(*stack).toInt();
    Stack arguments = torch::jit::pop(*stack, op->row.arguments());
    // PyTorch's takes no None.
    if (op->row.name() == "constant_pad_nd" && arguments[2].isNone()) arguments[2] = at::Scalar(0);
    auto call = c10::make_intrusive<CheapCall>(op);
    stack->emplace_back(run(call, call->take(arguments), recompute, in_place));
  }

  Tensor run(const CallPtr& call, std::vector<Tensor> tensors, RecomputeArgument recompute, int64_t in_place) const {
    if (tensors.empty()) return call->run(tensors);  // an empty list: PyTorch's error
    if (in_place && !same_as_overwriting(tensors, call->arguments)) {
      Stack stack = call->with(tensors);
      stack[0] = tensors[0].clone();
      op->overwriting->callBoxed(&stack);
      return stack[0].toTensor();
    }
    const auto device = tensors[0].device().type();
    const auto key = autocast_key(device);
    if (!in_place) {
      if (op->row.scripted == Scripted::float32)
        for (Tensor& t : tensors) t = as_scripted(t, recompute);
      const bool has_dtype = op->dtype_at && !call->arguments[*op->dtype_at].isNone();
      if (key && !has_dtype && op->listed.hasKernelForDispatchKey(*key)) {
        if (op->promotes(device)) {
          if (!promoted(tensors, device)) return call->run(tensors);
        } else {
          for (Tensor& t : tensors)
            if (t.defined()) t = cast_for_autocast(at::kFloat, t, device, recompute);
        }
      }
    }
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if (key) no_autocast.emplace(*key);
    if (!usable(tensors)) return overwritten(call->run(tensors), tensors[0], in_place);
    const bool ours = op->derivative && (!op->derivative->takes || op->derivative->takes(call->arguments));
    Cheap::Result result;
    const Tensor made =
        ours ? Cheap::apply(at::TensorList(tensors), call, recompute.recomputes(), &result) : call->run(tensors);
    if (result.kept) keeps_itself(made, *result.kept);
    const Tensor out = overwritten(made, tensors[0], in_place);
    if (op->row.offers && !out.is_alias_of(tensors[0]) && out.device() == tensors[0].device())
      offer_again(out, call, tensors, recompute);
    if (result.place >= 0) takes_own_output(out, result.place);
    return out;
  }

  static Tensor overwritten(const Tensor& made, const Tensor& target, int64_t in_place) {
    return in_place ? in_strides(made, target.strides()) : made;
  }

  void offer_again(const Tensor& out, const CallPtr& call, const std::vector<Tensor>& tensors,
                   RecomputeArgument recompute) const {
    if (op->cast()) {
      offer(
          out, {tensors[0]},
          [to = out.scalar_type()](std::vector<Tensor>& from, const auto&) { return from[0].to(to); }, recompute);
      return;
    }
    // The first operand's memory may take the result.
    const bool overwrites =
        op->overwriting && out.sizes() == tensors[0].sizes() && out.scalar_type() == tensors[0].scalar_type();
    offer(
        out, tensors,
        [call, overwrites](std::vector<Tensor>& from, const std::vector<bool>& spare) {
          if (!overwrites || !spare[0] || !from[0].is_non_overlapping_and_dense()) return call->run(from);
          Stack stack = call->with(from);
          call->op->overwriting->callBoxed(&stack);
          return stack[0].toTensor();
        },
        recompute, op->pieces() ? Pieces::yes : Pieces::no, {}, by_row(out, tensors) ? Rows::own : Rows::all);
  }

  // Operands that are broadcast otherwise would not fit a few of the rows.
  bool by_row(const Tensor& out, const std::vector<Tensor>& tensors) const {
    return op->row.by_element && std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& t) {
             return t.sizes() == out.sizes() || t.numel() == 1 || t.dim() == 1;
           });
  }

  OpPtr op;
};

}  // namespace

void register_cheap_ops(torch::Library& m) {
  for (const CheapOp& row : kCheapOps) {
    const auto op = c10::make_intrusive<Op>(row);
    std::string schema(row.schema);
    schema.insert(schema.rfind(") ->"), row.in_place ? ", int recompute=0, int in_place=0" : ", int recompute=0");
    m.def(schema.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
    m.impl(std::string(row.full_name()).c_str(), c10::DispatchKey::FuncTorchBatched,
           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
  }
}

}  // namespace tsmem
