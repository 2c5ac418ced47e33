#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// y = softmax(q k^T / sqrt(d)) v, z = a b.
Pattern attention() {
  return {.name = "attention",
          .algebra = "y = scaled_dot_product_attention(q, k, v), or z = matmul(a, b)",
          .keeps =
              "before: q, k, v, y, or copies of a and b; after: q, k, v or what they are made from, y where that is "
              "not recomputed, or a and b or what they are made from",
          .conditions = "nothing writes to q, k, v, the mask, y, a or b later: PyTorch's may keep copies",
          .for_regions = true,
          .rules = {same_schema("scaled_dot_product_attention", 8, {"a0", "a1", "a2", "a3", "z"}),
                    same_schema("matmul", 2, {"a0", "a1"})}};
}

}  // namespace tsmem
