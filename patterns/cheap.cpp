#include "patterns/cheap.h"

#include "patterns/same_schema.h"

namespace tsmem {
namespace {

// A sum or product with a number has a canonical name of its own (rewriter/rewrite/canonical.h).
std::string canonical_name(const CheapOp& op) {
  const std::string name(op.name());
  return name == "add" || name == "mul" ? name + "_number" : name;
}

Rule rule(const CheapOp& op) {
  if (canonical_name(op) == "add_number")
    return {.match = "%z = add_number(%a0, %a1)", .rewrite = "%z = tsmem::add(%a0, %a1, 1)"};
  if (canonical_name(op) == "mul_number")
    return {.match = "%z = mul_number(%a0, %a1)", .rewrite = "%z = tsmem::mul(%a0, %a1)"};
  return same_schema(std::string(op.name()), op.arguments());
}

}  // namespace

const std::set<std::string>& recomputed_operators() {
  static const std::set<std::string> names = [] {
    std::set<std::string> all = {
        "batch_norm",    "act",        "mul",     "add",     "dropout",     "layer_norm", "group_norm",
        "instance_norm", "max_pool2d", "cat",     "permute", "softmax",     "matmul",     "roll",
        "transpose",     "view",       "reshape", "linear",  "contiguous",  "unsqueeze",  "slice",
        "chunk",         "split",      "unbind",  "expand",  "flatten",     "select",     "squeeze",
        "mean",          "sum",        "addmm",   "mm",      "bmm",         "baddbmm",    "rms_norm",
        "parameter",     "prelu",      "glu",     "rrelu",   "_grouped_mm", "einsum",     "pad"};
    all.insert("scaled_dot_product_attention");  // it keeps its result
    all.insert("kept");
    for (const char* kind : {"reflection_pad", "replication_pad"})
      for (const char* dimensions : {"1d", "2d", "3d"}) all.insert(std::string(kind) + dimensions);
    for (const CheapOp& op : kCheapOps)
      if (op.offers) all.insert(canonical_name(op));
    return all;
  }();
  return names;
}

std::vector<Rule> cheap_rules(Worth worth) {
  std::vector<Rule> rules;
  std::set<std::pair<std::string_view, size_t>> seen;
  for (const CheapOp& op : kCheapOps)
    if (op.worth == worth && seen.emplace(op.name(), op.arguments()).second) {
      rules.push_back(rule(op));
      if (worth != Worth::fed) continue;
      rules.back().fed_by = recomputed_operators();
      if (!op.offers) rules.back().fed_by.erase("kept");  // it gains by what its operand is made from alone
    }
  return rules;
}

}  // namespace tsmem
