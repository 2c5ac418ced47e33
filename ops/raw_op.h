// Raw ops (tsmem::_…: a kernel for each device, without autograd) as C++ functions. Their schemas have an activation
// as four arguments, "int act, float act_a, float act_b, float act_c"; C++ functions have one, const Act&.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>
#include <utility>

#include "act.h"

namespace tsmem {

// A parameter of a C++ function as the dispatcher has it: itself, or the four of an activation.
template <class T>
struct InSchema {
  using Types = std::tuple<T>;
  static Types from(T value) { return Types(std::forward<T>(value)); }
  template <size_t at, class Arguments>
  static T back(Arguments& arguments) {
    return std::forward<T>(std::get<at>(arguments));
  }
};
template <>
struct InSchema<const Act&> {
  using Types = std::tuple<int64_t, double, double, double>;
  static Types from(const Act& act) { return {static_cast<int64_t>(act.kind), act.a, act.b, act.c}; }
  template <size_t at, class Arguments>
  static Act back(Arguments& arguments) {
    return {static_cast<ActKind>(std::get<at>(arguments)), std::get<at + 1>(arguments), std::get<at + 2>(arguments),
            std::get<at + 3>(arguments)};
  }
};
template <class... P>
using SchemaTypes = decltype(std::tuple_cat(std::declval<typename InSchema<P>::Types>()...));

// `f` as the dispatcher calls it: TORCH_FN((FromSchema<&f>::call)).
template <auto f, class Types>
struct FromSchemaTypes;
template <class R, class... P, R (*f)(P...), class... T>
struct FromSchemaTypes<f, std::tuple<T...>> {
  static R call(T... arguments) {
    std::tuple<T...> all(std::forward<T>(arguments)...);
    return unflatten(all, std::index_sequence_for<P...>());
  }

 private:
  // Where parameter i of f begins among the schema's.
  static constexpr size_t begin_of(size_t i) {
    constexpr size_t sizes[] = {std::tuple_size_v<typename InSchema<P>::Types>...};
    size_t begin = 0;
    for (size_t k = 0; k < i; ++k) begin += sizes[k];
    return begin;
  }
  template <size_t... i>
  static R unflatten(std::tuple<T...>& all, std::index_sequence<i...>) {
    return f(InSchema<P>::template back<begin_of(i)>(all)...);
  }
};
template <auto f>
struct FromSchema;
template <class R, class... P, R (*f)(P...)>
struct FromSchema<f> : FromSchemaTypes<f, SchemaTypes<P...>> {};

// An op by its name, called by way of the dispatcher.
template <class Signature, class Types>
class RawOpOf;
template <class R, class... P, class... T>
class RawOpOf<R(P...), std::tuple<T...>> {
 public:
  explicit RawOpOf(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")), typed_(handle_.typed<R(T...)>()) {}
  const c10::OperatorHandle& handle() const { return handle_; }
  R operator()(P... arguments) const {
    return std::apply([&](auto&&... flat) { return typed_.call(std::forward<decltype(flat)>(flat)...); },
                      std::tuple_cat(InSchema<P>::from(std::forward<P>(arguments))...));
  }

 private:
  c10::OperatorHandle handle_;
  c10::TypedOperatorHandle<R(T...)> typed_;
};
template <class Signature>
struct SchemaTypesOf;
template <class R, class... P>
struct SchemaTypesOf<R(P...)> {
  using type = SchemaTypes<P...>;
};
template <class Signature>
using RawOp = RawOpOf<Signature, typename SchemaTypesOf<Signature>::type>;

}  // namespace tsmem
