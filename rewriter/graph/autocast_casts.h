// The casts that eager autocast makes, written out as operators.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

namespace tsmem {

// Autocast as it is switched on around a node.
struct Autocast {
  std::map<std::string, int64_t> dtypes;  // by type of devices ("cpu"), in the schema's numbers
  bool caches = false;                    // parameters are cast once
};

// Where casts come from and go to.
struct Casts {
  nlohmann::json& graph;  // whose "tensor_values" describe the node's operands, and are to describe the casts
  const std::set<std::string>& parameters;
  std::function<std::string(const std::string& wanted)> unused_name;
  std::map<std::pair<std::string, int64_t>, std::string> cached = {};  // of parameters, by name and dtype
};

// Adds to the graph's nodes the casts that autocast makes of a node's operands, and makes their results its operands.
// False, and no cast, where PyTorch composes the operator of others and it isn't known what is cast among them.
// Source: aten/src/ATen/autocast_mode.h of PyTorch. Which operators are cast is asked of the dispatcher, and to which
// dtype, of the results that torch.export has noted.
bool add_casts(Casts& casts, const Autocast& autocast, nlohmann::json& node);

}  // namespace tsmem
