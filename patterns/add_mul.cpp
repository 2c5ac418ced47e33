#include "patterns/all.h"

namespace tsmem {

// z = a + b, z = a * b: z is recomputed where a and b are kept or recomputed themselves.
static const std::set<std::string> kRecomputed = {
    "batch_norm", "act",    "mul",        "add",     "dropout", "layer_norm", "group_norm", "instance_norm",
    "max_pool2d", "cat",    "permute",    "softmax", "matmul",  "roll",       "transpose",  "view",
    "reshape",    "linear", "contiguous", "addmm",   "mm",      "bmm",        "baddbmm",    "rms_norm"};

Pattern add() {
  return {.name = "add",
          .algebra = "z = a + b",
          .keeps = "before: z, where its user keeps it; after: what a and b are made from",
          .conditions = "a or b comes from a norm, an activation, a sum, a product or a branch",
          .for_regions = true,
          .rules = {{.match = "%z = add(%a, %b)", .rewrite = "%z = tsmem::add(%a, %b, 1)", .fed_by = kRecomputed}}};
}

Pattern mul() {
  return {.name = "mul",
          .algebra = "z = a * b",
          .keeps = "before: a, b, and z, where its user keeps it; after: what a and b are made from",
          .conditions = "a or b comes from a norm, an activation, a sum, a product or a branch",
          .for_regions = true,
          .rules = {{.match = "%z = mul(%a, %b)", .rewrite = "%z = tsmem::mul(%a, %b)", .fed_by = kRecomputed}}};
}

}  // namespace tsmem
