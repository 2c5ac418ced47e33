// Whether what matches a rule may be replaced.
#pragma once
#include "rewriter/rewrite/attempt.h"
#include "rewriter/rewrite/sharing.h"

namespace tsmem {

class Legality {
 public:
  Legality(const View& view, const Operators& operators, Sharing& sharing)
      : view_(view), operators_(operators), sharing_(sharing) {}

  // Why a match may not be replaced; empty where it may.
  std::string refusal(const CompiledRule& rule, const Attempt& a) const;

  // Whether others see what overwrites a dropout's result, which may be its argument then (gives_overwritten_input).
  bool argument_is_seen(Node* dropout) const { return !seen_after(dropout->input(0), dropout, dropout).empty(); }

 private:
  const View& view_;
  const Operators& operators_;
  Sharing& sharing_;

  std::string name_of(const Node* n) const { return tsmem::name_of(view_, n); }
  std::string escapes(const CompiledRule& rule, const Attempt& a, size_t line, size_t output) const;
  std::string reads_inner_value(const CompiledRule& rule, const Attempt& a) const;
  std::string seen_after(Value* v, Node* user, Node* n) const;
  std::string written_by_dead_code(Value* value) const;
  std::string written_later(const Attempt& kept) const;
  std::string disturbed(const Attempt& a) const;
  std::string writes(Node* n, const Attempt& a, bool in_between) const;
};

// Whether a dropout's result may be its argument, with p = 0 or in evaluation, and is overwritten; and how that is
// said.
bool gives_overwritten_input(const torch::jit::Node* dropout);
std::string overwritten_input(const std::string& name);

}  // namespace tsmem
