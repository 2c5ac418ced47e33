// Whether JSON has the form of an exported graph, before anything takes it apart.
#pragma once
#include <nlohmann/json_fwd.hpp>

namespace tsmem {

// Of a "graph_module": what this library reads is there and of its type. What its words mean is not asked here.
bool is_graph_module(const nlohmann::json& graph_module);

}  // namespace tsmem
