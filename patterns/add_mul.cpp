#include "patterns/all.h"
#include "patterns/cheap.h"

namespace tsmem {

// z = a + b, z = a * b: z is recomputed where a and b are kept or recomputed themselves.
Pattern add() {
  return {
      .name = "add",
      .algebra = "z = a + b",
      .keeps = "before: z, where its user keeps it; after: what a and b are made from",
      .conditions = "a or b comes from a norm, an activation, a sum, a product or a branch, or both are kept anyway",
      .for_regions = true,
      .rules = {
          {.match = "%z = add(%a, %b)", .rewrite = "%z = tsmem::add(%a, %b, 1)", .fed_by = recomputed_operators()}}};
}

Pattern mul() {
  return {
      .name = "mul",
      .algebra = "z = a * b",
      .keeps = "before: a, b, and z, where its user keeps it; after: what a and b are made from",
      .conditions = "a or b comes from a norm, an activation, a sum, a product or a branch, or both are kept anyway",
      .for_regions = true,
      .rules = {{.match = "%z = mul(%a, %b)", .rewrite = "%z = tsmem::mul(%a, %b)", .fed_by = recomputed_operators()}}};
}

}  // namespace tsmem
