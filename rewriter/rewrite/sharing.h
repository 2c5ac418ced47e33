// Which values of a view may share memory: by who made a tensor, by the real memory of the loaded parameters and
// buffers, and by LibTorch's alias analysis, in this order.
#pragma once
#include "rewriter/rewrite/operators.h"

namespace tsmem {

class Sharing {
 public:
  Sharing(const View& view, const Operators& operators, const Attributes& attributes)
      : view_(view), operators_(operators), attributes_(attributes) {}

  // Whether two tensors may share memory.
  bool may_alias(Value* x, Value* y);

  // Whether a write to `written` may change v, a tensor or a list of tensors.
  bool reaches(Value* written, Value* v);

  // Whether two lists or dictionaries may be the same one.
  bool same_container(Value* a, Value* b) { return aliases().mayAlias(a, b); }

  // Whether v, a tensor or a list that is made here, is known to come from an attribute, be it in one branch.
  bool may_be_attribute(Value* v) const {
    return comes_from_attribute(v, [](const std::string&) { return true; });
  }

  // The same of the attributes that some method of the model writes to in place.
  bool written_by_the_model(Value* v) const { return comes_from_attribute(v, attributes_.written); }

  // Whether v is the memory of attributes that are tensors of integers, which no pattern takes.
  bool is_counter(Value* v) const;

  // Whether v is memory that is new in this call.
  bool made_here(Value* v) const;

  // The first value of a chain of in-place operators.
  Value* root(Value* v) const;

 private:
  using ValueSet = std::unordered_set<Value*>;
  struct Origins {
    ValueSet found, seen;
  };

  const View& view_;
  const Operators& operators_;
  const Attributes& attributes_;
  std::unique_ptr<torch::jit::AliasDb> alias_;
  std::vector<std::vector<Value*>> givers_;
  std::unordered_map<Value*, ValueSet> sharing_;

  torch::jit::AliasDb& aliases();
  const ValueSet& sharing(Value* v);
  void collect_givers(Block* block);
  bool collect_origins(Value* v, Origins& origins) const;
  bool collect_origins_of_elements(Value* list, Origins& origins) const;
  bool collect_origins_in_tuple(Value* tuple, size_t element, Origins& origins) const;
  // Whether the attribute of this path may be given another tensor in this call.
  bool is_set(const std::string& path) const;
  bool comes_from_attribute(Value* v, const std::function<bool(const std::string&)>& wanted) const;
  bool share_an_origin(const ValueSet& x, const ValueSet& y) const;
};

}  // namespace tsmem
