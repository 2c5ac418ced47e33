#include "patterns/all.h"
#include "patterns/same_schema.h"

namespace tsmem {

// y = conv(x, w): keeps x only if w needs grad, and w only if x does. PyTorch keeps both always.
Pattern convolution() {
  Pattern p{.name = "conv",
            .algebra = "y = conv(x, w, b)",
            .keeps = "before: x, w; after: x only if w needs grad, w only if x does",
            .conditions = "none",
            .rules = {}};
  for (const char* op : {"conv1d", "conv2d", "conv3d"}) p.rules.push_back(same_schema(op, 7));
  for (const char* op : {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
    p.rules.push_back(same_schema(op, 8));
  p.rules.push_back(same_schema("_convolution", 13));
  p.rules.push_back(same_schema("_convolution", 12));
  p.rules.push_back(same_schema("_convolution_mode", 7));
  return p;
}

}  // namespace tsmem
