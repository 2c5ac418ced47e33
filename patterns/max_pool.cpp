#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// z = max_pool(x): keeps the position in the window and no input.
Pattern max_pool() {
  Pattern p{
      .name = "max-pool",
      .algebra = "z = max over a window of x",
      .keeps =
          "before: x and 8 bytes an output element; after: 4 bits an output element (2 for windows of 4, 8 over 16, "
          "16 over 256, 32 over 65,536)",
      .conditions = "the indices are not used",
      .rules = {}};
  for (const char* op : {"max_pool1d", "max_pool2d", "max_pool3d"}) {
    Rule rule = same_schema(op, 6);
    p.rules.push_back(rule);
    rule.match.replace(rule.match.find(op), std::string(op).size(), std::string(op) + "_with_indices");
    p.rules.push_back(rule);
  }
  for (const char* op : {"adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"})
    p.rules.push_back(same_schema(op, 2));
  return p;
}

}  // namespace tsmem
