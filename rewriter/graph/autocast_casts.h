// The casts that eager autocast makes, written out as operators.
#pragma once
#include "rewriter/graph/casts.h"

namespace tsmem {

// Autocast as it is switched on around a node.
struct Autocast {
  std::map<std::string, int64_t> dtypes;  // by type of devices ("cpu"), in the schema's numbers
  bool caches = false;                    // parameters are cast once
};

// Adds to the graph's nodes the casts that autocast makes of a node's operands, and makes their results its operands.
// A tensor of `uncertain` is cast also where it has that dtype by its description. False, and no cast, where it can't
// be told what is cast: PyTorch composes the operator of others, it is none of PyTorch's, or the description of its
// result is not what autocast gives (torch.export.export(strict=True) describes regions as if autocast were off).
// Source: aten/src/ATen/autocast_mode.cpp and .h of PyTorch. Which operators are cast is asked of the dispatcher.
bool add_casts(Casts& casts, const Autocast& autocast, const std::set<std::string>& uncertain, nlohmann::json& node);

// Whether autocast, on whatever device, may give the node's results another dtype.
bool may_be_cast(const nlohmann::json& node);

}  // namespace tsmem
