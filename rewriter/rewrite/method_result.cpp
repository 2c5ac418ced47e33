#include "rewriter/rewrite/method_result.h"

#include "rewriter/method_call.h"

namespace tsmem {

using namespace torch::jit;

MatchesOf matches_of(const Results& results) {
  return [&results](const c10::ClassType* type, const std::string& name) {
    auto it = results.find({type, name});
    return it == results.end() ? nullptr : &it->second.matched.found;
  };
}

BodyOf rewritten_bodies(const Results& results) {
  return [&results](const Node* call) {
    if (call->kind() == prim::CallMethod)
      if (const auto type = call->input(0)->type()->cast<c10::ClassType>())
        if (const auto it = results.find({type.get(), call->s(attr::name)}); it != results.end() && it->second.body)
          return it->second.body;
    return callee(call);
  };
}

}  // namespace tsmem
